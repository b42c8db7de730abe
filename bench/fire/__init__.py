"""Ten thousand turns under fire: real processes, real deaths, and a judge of every token.

``engines`` are what burns, ``fleet`` is one lease with its router, ``deeds`` does the damage,
``callers`` ask and say what was wrong. ``tests/faults/test_rollouts_fire.py`` is the same
on virtual time, without processes.
"""
