"""Rollout turns: what is kept of them, where they may run, when they move. Pure; no I/O, no clock.

- ``transcript``: tokens, log-probs and version spans of one turn, gathered leg by leg.
- ``spans``: which weight version sampled which tokens.
- ``splice``: what of a request survives a move to another engine, as a table.
- ``versions``: staleness and pins.
- ``views``, ``placement``, ``scoring``: what placement sees, who can take a turn, what it costs.
- ``guards``, ``policies``, ``placement``: one engine for one turn, by the rule that is asked for.
- ``estimates``: speed and reclaim hazard of an engine, from what the router saw itself.
- ``prospects``: memory of trajectories: ``lengths``, ``freshness``, ``shares``.
- ``prefixes``: which trajectory a turn without a key belongs to.
- ``inclusion``: whether borrowing changes what is trained on.
- ``watch``: when a turn that is running must move.
- ``warming``: where a trajectory's context is prefilled while its tool runs.
- ``rounds``: tail batching: which prompts a round starts, trains on and puts off.
- ``admission``: how many turns may wait, and what to tell those who may not.

Read ``transcript`` first, then ``placement``. ``rose_router`` is the shell around it.
"""
