"""What a trainer imports: the Publisher and the mismatch meter; see ``docs/publisher.md``."""
