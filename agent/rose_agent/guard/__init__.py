"""The guard's shell: gathers snapshots, asks ``rose_core.guard``, carries out its orders.

- ``loop``: the guard of a node and its tick; read this first.
- ``replica``: one serving replica: tap's book and polled figures.
- ``outcomes``: what finished requests teach: predictor, margin, meters, error budget, breaker;
  ``pools``: what the replicas of a pool share of that.
- ``slot``: one slot: permit, engine host calls, router stream, accounting. ``hold``, ``calls``,
  ``permit``, ``routerlink``: its parts.
- ``whole``: replicas that are lent whole. ``gpus``: what the node's GPUs can give.
- ``taplink``, ``hostlink``: the node-local neighbours.
- ``freezer``: what the guard does to an engine's cgroup when the host does not.
- ``recorder``: the flight recorder. ``blackbox`` keeps it after a breach, ``perfetto`` and
  ``timeline`` show it. ``state``: what survives a restart.
- ``report``: for the operator. ``inspect``: for people.
"""
