"""What the wire tap costs, and whether it sees what the client sees: ``python -m bench.tap``.

- ``traffic``: an answering server and a measuring client in a network namespace of their own.
- ``watcher``: the real ``rose tap`` beside it, and what it said.
"""
