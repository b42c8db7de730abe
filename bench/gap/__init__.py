"""``python -m bench.gap``: what a running stream loses when its engine changes weights.

Read ``models`` (what is served), ``switches`` (four ways to change), ``__main__`` (what is lost).
"""
