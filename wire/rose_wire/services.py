"""The gRPC methods of ROSE: who dials whom, and for what.

| method | dialled by | served by | address |
|---|---|---|---|
| ``SYNC`` | node agent (guard) | operator | Service of the operator |
| ``ENSURE``, ``STOP``, ``HOLD``, ``STATUS`` | guard | engine host | Unix socket on the node |
| ``ATTACH`` | guard, dedicated engine host | router | Service of the lease's router |

The weight plane's methods stand in ``rose_weights.service``.
"""

from rose_core.wire.host import (
    Accepted,
    EngineStatus,
    EnsureEngine,
    HoldEngine,
    HostStatus,
    HostStatusRequest,
    StopEngine,
)
from rose_core.wire.routing import EngineUpdate, RouterNote
from rose_core.wire.sync import SyncReply, SyncRequest
from rose_wire.rpc import Method

SYNC = Method("rose.v1.Operator", "Sync", SyncRequest, SyncReply)

ENSURE = Method("rose.v1.EngineHost", "Ensure", EnsureEngine, EngineStatus)
STOP = Method("rose.v1.EngineHost", "Stop", StopEngine, EngineStatus)
HOLD = Method("rose.v1.EngineHost", "Hold", HoldEngine, Accepted)
STATUS = Method("rose.v1.EngineHost", "Status", HostStatusRequest, HostStatus)

ATTACH = Method("rose.v1.Router", "Attach", EngineUpdate, RouterNote)
