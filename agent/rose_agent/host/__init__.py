"""Engine host: runs rollout engines as its children and stops them when their permit lapses.

Read ``main`` first: ``rose engine-host``. ``privilege_split`` is its entry, ``dedicated`` orders an
engine without a guard. Below, by floors:

- ``slots``: ``engine_host`` has them all, ``lifecycle`` is one engine, ``dual_share`` a pair.
- ``helper``: the small process that stays root for a host that is not.
- ``enforcement``: stop an engine whose permit lapses. ``rose_agent.os``: how.
- ``sharing``: MPS and limits by the driver. ``discovery``: what this node offers.
- ``options``: what the host is given. ``vacancy``: who may still hold a GPU.
- ``processes``: what is run, how it is contained, what an earlier host left.
- ``memory``: device memory of engines. ``users``: whose they are. ``route``: the data route.
"""
