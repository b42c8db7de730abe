"""The main job on real parts, with a live table and a report; see ``rose demo --help``.

Read in this order: ``main`` (the course of a run), ``stack`` (brings everything up; ``manifests``
and ``pieces`` are what it applies), ``measure`` (trainer and load, and what is
collected), ``verdicts`` (were the promises kept), ``report``.
"""
