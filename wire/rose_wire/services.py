"""The gRPC methods of ROSE: who dials whom, and for what.

| method | dialled by | served by | address |
|---|---|---|---|
| ``SYNC``, ``NOTICES`` | node agent (guard) | operator | Service of the operator |
| ``ENROL`` | node agent without a certificate | operator | the same, on a port of its own |
| ``ENROL_ROUTER`` | router | operator | the same port |
| ``ENSURE``, ``STOP``, ``HOLD``, | guard | engine host | Unix socket on the node |
| ``DORMANT``, ``LIMIT``, ``STATUS`` | | | |
| ``FOLLOW`` | guard of a follower's node | guard of the leader's node | pod of that guard |
| ``ATTACH`` | guard, dedicated engine host | router | Service of the lease's router |
| ``DEMAND`` | operator | router | the same; each replica where there are several |

The weight plane's methods stand in ``rose_weights.methods``.
"""

from rose_core.wire.enrolment import (
    EnrolReply,
    EnrolRequest,
    EnrolRouterRequest,
    RouterIdentity,
)
from rose_core.wire.host import (
    Accepted,
    EngineStatus,
    EnsureEngine,
    HoldEngine,
    HostStatus,
    HostStatusRequest,
    LimitMemory,
    SetDormant,
    StopEngine,
)
from rose_core.wire.leading import LeaderQuestion, LeaderUpdate
from rose_core.wire.routing import DemandNote, DemandRequest, EngineUpdate, RouterNote
from rose_core.wire.sync import Notice, NoticeRequest, SyncReply, SyncRequest
from rose_wire.rpc import Method

SYNC = Method("rose.v1.Operator", "Sync", SyncRequest, SyncReply)
NOTICES = Method("rose.v1.Operator", "Notices", NoticeRequest, Notice)
ENROL = Method("rose.v1.Identity", "Enrol", EnrolRequest, EnrolReply)
ENROL_ROUTER = Method("rose.v1.Identity", "EnrolRouter", EnrolRouterRequest, RouterIdentity)

ENSURE = Method("rose.v1.EngineHost", "Ensure", EnsureEngine, EngineStatus)
STOP = Method("rose.v1.EngineHost", "Stop", StopEngine, EngineStatus)
HOLD = Method("rose.v1.EngineHost", "Hold", HoldEngine, Accepted)
DORMANT = Method("rose.v1.EngineHost", "Dormant", SetDormant, EngineStatus)
LIMIT = Method("rose.v1.EngineHost", "Limit", LimitMemory, EngineStatus)
STATUS = Method("rose.v1.EngineHost", "Status", HostStatusRequest, HostStatus)

FOLLOW = Method("rose.v1.Guard", "Follow", LeaderQuestion, LeaderUpdate)

ATTACH = Method("rose.v1.Router", "Attach", EngineUpdate, RouterNote)
DEMAND = Method("rose.v1.Router", "Demand", DemandRequest, DemandNote)
