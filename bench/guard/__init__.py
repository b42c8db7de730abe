"""``python -m bench.guard``: serving beside rollouts on two real engines pinned to one core.

- ``node``: the processes: serving engine, tap, engine host, agent; an operator inside the bench.
- ``load``: the serving load (a slice of a trace) and the rollout load, with their measurements.
- ``__main__``: conditions, rounds, the table.
"""
