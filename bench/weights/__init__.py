"""Weight plane: bytes per changed element beside the peers' layouts, and speed per core.

``python -m bench.weights`` (or ``make bench-weights``) takes about half a minute.
"""
