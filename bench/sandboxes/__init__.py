"""Sandboxes under loss: tasks as agents have them (``tasks``), killed after every turn."""
