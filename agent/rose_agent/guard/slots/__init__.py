"""One slot: its permit, its hold at the engine host, what is done where the host does nothing."""
