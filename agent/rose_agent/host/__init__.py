"""Engine host: runs rollout engines as its children and stops them when their permit lapses.

Start at ``main``, then ``engine_host`` (slots), ``lifecycle`` (one engine), ``enforcer`` (permit),
``groups`` (process trees), ``proxy`` (data route), ``repair`` (leftovers), ``dedicated``.
"""
