"""``python -m bench.guard``: serving beside rollouts on two real engines pinned to one core.

- ``node``: the processes: serving engine, tap, engine host, agent; an operator inside the bench.
- ``load``: the serving load (a slice of a trace) and the rollout load, with their measurements.
- ``windows``: one window: a condition, a load, a round; and the probes before.
- ``pace``: which windows are still to run, and how long they take.
- ``run``: runs them, whatever happens to one; ``kept``: what is on disk after each.
- ``analysis``, ``report``, ``picture``: windows -> figures, the table, the plot.
- ``__main__``: the knobs.
"""
