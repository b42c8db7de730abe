"""Rollout turns: what is kept of them, where they may run, when they move. Pure; no I/O, no clock.

- ``transcript``: tokens, log-probs and version spans of one turn, gathered leg by leg.
- ``spans``: which weight version sampled which tokens.
- ``splice``: what of a request survives a move to another engine, as a table.
- ``versions``: staleness and pins.
- ``placement``: hard filters, then expected time; one engine for one turn.
- ``estimates``: speed and reclaim hazard of an engine, from what the router saw itself.
- ``watch``: when a turn that is running must move.
- ``admission``: how many turns may wait, and what to tell those who may not.

Read ``transcript`` first, then ``placement``. ``rose_router`` is the shell around it.
"""
