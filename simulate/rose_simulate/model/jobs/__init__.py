"""What arrives: serving's requests, and RL jobs with their trainer and widths."""
