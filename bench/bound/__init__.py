"""``make bench-bound``: what lending adds to TTFT, against what ``docs/bound.md`` proves."""
