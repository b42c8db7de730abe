"""Messages between ROSE's processes, as frozen msgspec structs; ``rose_wire`` carries them.

- ``sync``: node agent -> operator: telemetry up, grants and pool policies down.
- ``host``: guard and weight-sync -> engine host on the same node (Unix socket).
- ``routing``: whoever owns an engine -> router: gates, caps, attested versions.

Unknown fields are ignored and new fields have defaults, so neighbours of the next or the previous
version understand each other.
"""
