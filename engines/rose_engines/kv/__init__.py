"""Cached keys and values: what a commit makes of them, and pages that outlive an engine."""
