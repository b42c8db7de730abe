"""Thousands of GPUs in bins of seconds, from what one replica does event by event."""
