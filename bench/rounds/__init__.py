"""Tail batching on real parts: the example's reward curve with rounds beside the one without."""
