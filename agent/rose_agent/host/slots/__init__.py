"""The host's slots and the life of each one's engines."""
