"""How ROSE's processes talk: gRPC with msgspec messages, and the pages every process serves.

- ``errors``: the exception tree.
- ``rpc``: typed methods over gRPC, without generated code.
- ``tls``: certificates of the hops between processes.
- ``services``: the methods of ROSE's services; read this first.
- ``observability``: ``/metrics`` and ``/healthz``; ``plainpages``: the same without a library.
"""
