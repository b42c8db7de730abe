"""``python -m bench.gap``: what a running stream loses when its engine changes weights.

Read ``models`` (what is served), ``switches`` (four ways to change), ``stream`` (what is lost).
"""
