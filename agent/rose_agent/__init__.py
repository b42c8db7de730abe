"""What runs on serving nodes: guard, tap, engine host, weight-sync; start at ``docs/guard.md``."""
