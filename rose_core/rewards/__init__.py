"""What a reward is, which one is computed next, for how long, and on how many workers (pure)."""
