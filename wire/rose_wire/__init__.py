"""How ROSE's processes talk: gRPC with msgspec messages, and the pages every process serves.

- ``errors``: the exception tree.
- ``rpc``: typed methods over gRPC, without generated code: dial and call; ``serving`` answers,
  ``method`` is what both share.
- ``local``: the same calls on one node, without gRPC; ``frames``: length and bytes on a socket.
- ``bearer``: the tokens that callers bring; ``tls``: certificates.
- ``services``: the methods of ROSE's services; read this first.
- ``observability``: ``/metrics`` and ``/healthz``; ``plainpages``: the same without a library.
- ``flags``, ``ports``, ``memory``, ``faults``, ``cgroups``: what several processes need of Linux
  and of their command lines.
"""
