"""What of the engine host is root: a process of its own that makes cgroups, spawns and kills.

With ``--host-uid`` the host itself has a user of its own and no capability; everything it needs of
root it asks of this helper over one socket pair. Read in this order:

- ``messages``: the closed set of requests. None names a path, a user or a limit.
- ``rights``: what root does for each, and what it refuses.
- ``serve``: the helper's process, one thread, no listener.
- ``client``: the host's side, behind the interfaces it has without a helper as well.
``rose_agent.host.privilege_split`` makes two processes of one; it is the verb's entry.
"""
