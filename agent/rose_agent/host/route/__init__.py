"""The data route: the only way into an engine from outside the node."""
