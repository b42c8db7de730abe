"""Engine host: runs rollout engines as its children and stops them when their permit lapses.

- ``main``: ``rose engine-host``; read this first. ``assembly``: what its slots share.
- ``engine_host``: the slots. ``dual_share``: a slot's engines. ``lifecycle``: one of them.
- ``engine_process``, ``process``, ``launchers``, ``classes``: what is run, and how it is contained.
- ``enforcer``, ``enforcement``: stop an engine whose permit lapses. ``rose_agent.os``: how.
- ``accounts``, ``cpu_throttle``: its user, and what it may take of the node.
- ``sharing``, ``mps``, ``mps_trees``, ``elastic``, ``sizing``, ``dormancy``: its GPU and memory.
- ``proxy``, ``tokens``: the data route. ``dedicated``: an engine without a guard.
- ``repair``: leftovers of an earlier host. ``vacancy``: who may still hold a GPU.
- ``helper``: the small process that stays root for a host that is not.
"""
