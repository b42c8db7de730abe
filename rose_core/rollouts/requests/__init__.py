"""What a turn may ask of an engine, what of it survives a move, and what its log-probs then are."""
