"""``python -m bench.guard``: serving beside rollouts on two real engines pinned to one core.

- ``node``: the processes: serving engine, tap, engine host, agent; an operator inside the bench.
- ``load``: the serving load (a slice of a trace) and the rollout load, with their measurements.
- ``measured``: what a window was measured to be; ``reactions``: what its flight recorder adds.
- ``windows``: one window: a condition, a load, a round; and the probes before.
- ``pace``: which windows are still to run, and how long they take.
- ``run``: runs them, whatever happens to one; ``run_record``: what is on disk after each.
- ``results``, ``analysis``: all windows, and what follows from comparing them.
- ``bound``, ``beyond``: TTFT beside lending against its bound; a command of its own.
- ``report``, ``run_record``: figures and table, plot.
- ``__main__``: the knobs.
"""
