"""Decisions and shared vocabulary of ROSE: pure functions over snapshots.

Nothing here does I/O or knows a clock: shells gather snapshots, call ``decide(snapshot, now)`` and
carry out the actions. The same function runs in production, under virtual time in tests and in
the simulator. ``docs/architecture.md`` shows which shell calls which room.
"""
