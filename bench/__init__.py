"""Benchmarks: ``python -m bench.NAME`` or ``make bench-NAME``; figures go to ``out/bench``."""
