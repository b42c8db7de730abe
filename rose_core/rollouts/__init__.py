"""Rollout turns: what is kept of them, where they may run, when they move. Pure; no I/O, no clock.

- ``terms``: what a lease says, and every policy that follows from it.
- ``trajectories``: what is remembered of trajectories, and expected.
- ``training``: a trainer's rounds, batches, rhythm and publishes.
- ``placement``: which waiting turn goes to which engine, when it moves.
- ``conversations``: turns that belong together, by messages or by tokens.
- ``engines``: what is known of one engine.
- ``transcripts``: tokens, weight versions and text of one turn.
- ``capacity``: queue, shares of jobs, memory, replicas of the router.
- ``requests``: which parameters are taken, and which survive a move.
- ``versions``: staleness and pins.

Read ``transcripts.transcript`` first, then ``placement.selection``. ``rose_router`` is the shell
around it; import-linter keeps the floors.
"""
