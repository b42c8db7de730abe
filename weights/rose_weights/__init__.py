"""The weight plane: store, gRPC service, client; start at ``docs/weight-format.md``."""
