"""Engines of a lease: the fleet, connections to them, fences."""
