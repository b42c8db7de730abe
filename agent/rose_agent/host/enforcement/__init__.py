"""Stops an engine whose permit lapses: the decision, and the thread that carries it out."""
