"""The wire tap: a passive packet socket in each serving pod, in a process of its own.

- ``main``: ``rose tap``; splits into an opener and a parser before any packet is read.
- ``opener``: keeps the capabilities, enters namespaces, opens sockets, parses nothing.
- ``parser``: has no capability and no network; reads packets, follows requests, tells the guard.
- ``replica``: one followed replica; ``packets``: what it reads.
- ``sockets``: packet sockets, and when the kernel saw a packet (``rose_agent.os.bpf``: filters).
- ``frames``: messages of ``tap.sock``.

``docs/tap.md`` says what the tap can and cannot see.
"""
