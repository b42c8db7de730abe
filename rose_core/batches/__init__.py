"""What a batch is, which of its lines goes next, and what becomes of an answer (pure)."""
