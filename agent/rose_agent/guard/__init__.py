"""The guard's shell: gathers snapshots, asks ``rose_core.guard``, carries out its orders.

- ``loop``: the loop itself; read this first.
- ``replica``: one serving replica: tap's book, polled figures, predictor, meters.
- ``slot``: one slot: permit, engine host calls, router stream.
- ``taplink``, ``hostlink``: the node-local neighbours.
- ``freezer``: what the guard does to an engine's cgroup when the host does not.
- ``recorder``: the flight recorder. ``state``: what survives a restart.
- ``report``: for the operator. ``inspect``: for people.
"""
