"""Decides, many times a second, whether a rollout engine may compute beside live traffic.

- ``reasons``: the closed words for every closed gate and every rung.
- ``predictor``: prefill and decode cost, alone and co-running, corrected online.
- ``regime``: bursty or never idle, by the idle time that can be used.
- ``shares``: which share of its time a request met an open gate, and what that says about cost.
- ``margin``: how much of a budget is kept back.
- ``slack``: what each serving request has left; the share of time that may be lent.
- ``certificate``: what lending may add to a TTFT, and whether that fits into the SLO.
- ``gate``: open, duty-cycled or closed, and why.
- ``ladder``: how an engine is stopped: rungs with deadlines and escalation.
- ``standstill``: whether a process tree that is late in stopping is to be killed.
- ``slot``: one slot's whole life on its node: ``decide(state, snapshot, now)``.
- ``grants``: which grants are alive, by leader term and the node's own clock.
- ``whole``: a replica that is drained and sleeps while its GPUs are lent whole.
- ``crossover``: harm measured by cycles that a coin lends or withholds, and by un-lent replicas.
- ``trial``: what lending has added over withheld cycles, as a confidence sequence.
- ``experience``: what finished requests teach, for the guard and the simulator alike.
- ``budget``: how fast the error budget burns, and the breaker.

Pure; ``rose_agent.guard`` is the shell.
"""
