"""The guard's shell: gathers snapshots, asks ``rose_core.guard``, carries out its orders.

Read ``loop`` first: the guard of a node, its tick, and what survives a restart. ``main`` starts it.
Below it, floor by floor:

- ``devices``: what GPUs can give. ``groups``: replicas over several nodes.
- ``sync``: the operator's side: certificate, report, grants.
- ``slots.slot``: one slot: permit, engine host calls, router stream, accounting; ``hold`` and
  ``freezer`` are its parts.
- ``replicas.replica``: one serving replica: tap's book and polled figures. ``outcomes``: what
  finished requests teach; ``pools``: what the replicas of a pool share of that; ``whole``: replicas
  that are lent whole.
- ``links``: the node's neighbours. ``flight``: recorder, dumps, pictures.
- ``inspection``: pages and verbs for people.
"""
