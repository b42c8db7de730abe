"""``make bench-rollouts``: policies of placement on one step of work, side by side."""
