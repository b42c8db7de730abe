"""What the wire tap costs, and whether it sees what the client sees: ``python -m bench.tap``.

- ``traffic``: an answering server and a measuring client in a network namespace of their own.
- ``watcher``: the real ``rose tap`` beside it, and what it said.
- ``readers``: guard and tap on a node of busy replicas, tokens read or counted in the kernel.
"""
