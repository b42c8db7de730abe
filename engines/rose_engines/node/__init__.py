"""What the processes of a node share with an engine: permit, run directory, and who is busy."""
