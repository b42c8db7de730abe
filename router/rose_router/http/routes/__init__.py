"""Handlers of the router's routes, one module for each kind of caller."""
