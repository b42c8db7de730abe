"""Guard and weight-sync -> engine host, over a Unix socket on the node.

The engine host alone starts, stops, pauses and continues rollout engines. A pause is a set of
holders: an engine runs only while nobody holds it, so nobody's resume undoes another's pause.
The permit (``rose_engines.node.permit``) is not here: it is shared memory, because the guard must
be able to let it lapse by doing nothing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rose_core.host_reasons import HostReason
from rose_core.identity import GpuUuid, LeaseUid, PodUid, SlotKey
from rose_core.wire.routing import AdapterVersion
from rose_core.wire.sync import EngineSpec, NodeModel, WeightSource


class Holder(StrEnum):
    """Who keeps an engine paused."""

    GUARD = "Guard"
    COMMIT = "Commit"
    RETRACT = "Retract"


class EngineState(StrEnum):
    """Life of a rollout engine under the host.

    ``Starting -> Serving <-> Dormant -> Stopping -> Gone``; ``Failed`` after a crash, left by
    back-off into ``Starting``.
    """

    STARTING = "Starting"
    SERVING = "Serving"
    DORMANT = "Dormant"
    STOPPING = "Stopping"
    FAILED = "Failed"
    GONE = "Gone"


class EnsureEngine(msgspec.Struct, frozen=True):
    """Run this engine for this slot; idempotent, a higher generation replaces a lower one.

    Attributes:
        token: bearer token that the slot's data route demands from the router.
        pod_uid: the serving pod that it runs beside.
        lendable_bytes: device memory that may be lent there; None = unknown.
        lendable_text: that sum in figures, for people; empty = nobody has worked it out.
        lease: whose engine it is, ``namespace/name``.
        lease_uid: a lease that is made anew under its name has another; empty = not told.
        kv_secret: by which pages of the lease's keys are sealed in other nodes' memory; empty =
            they do not leave this node.
    """

    slot: SlotKey
    slot_name: str
    engine: EngineSpec
    weights: WeightSource
    gpu_uuids: tuple[GpuUuid, ...] = ()
    token: str = ""
    pod_uid: PodUid = PodUid("")
    lendable_bytes: int | None = None
    lendable_text: str = ""
    lease: str = ""
    kv_secret: str = ""
    lease_uid: LeaseUid = LeaseUid("")


class StopEngine(msgspec.Struct, frozen=True):
    """End the slot's engine and verify that its GPUs are free of it.

    Attributes:
        reason: the gate's, for the host's log.
        deadline_seconds: kill what has not ended by then.
    """

    slot: SlotKey
    reason: str
    deadline_seconds: float = 5.0


class HoldEngine(msgspec.Struct, frozen=True):
    """Pause (``hold`` true) or no longer pause the slot's engine for one holder."""

    slot: SlotKey
    holder: Holder
    hold: bool


class SetDormant(msgspec.Struct, frozen=True):
    """Rung 4: let go of the engine's memory (``dormant`` true), or take it back.

    The answer comes at once; the effect shows in the status. A release leads to ``Dormant``, or to
    ``can_dormant`` false with a reason, after which the engine has to be ended. An activation is
    carried out under an open permit and leads to ``Serving`` without a version, until the
    weights are attested anew.
    """

    slot: SlotKey
    dormant: bool


class LimitMemory(msgspec.Struct, frozen=True):
    """The guard's limits for the memory of the slot's engine.

    The answer comes at once; the effect shows in the status. Engines that are not elastic have
    no budget to hold: their ``kv_permille`` stays None.

    Attributes:
        permille: budget of its elastic KV memory; None = as it is.
        held_bytes: what the driver says that its processes hold; more than it was made for ends
            it (``MemoryOverrun``).
    """

    slot: SlotKey
    permille: int | None = None
    held_bytes: int | None = None


class EngineStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine as the host sees it.

    Attributes:
        endpoint: URL of the slot's data route (authorised proxy), reachable by routers.
        version, digest: last attested on the live weights of the process that serves now; empty
            before that, and then no turn may be sent.
        head: newest version of the run that weight-sync has heard of; empty = unknown.
        generated_tokens: output tokens that passed the data route.
        weight_bytes: size of the weights that were pulled for the process that serves now.
        reason: why it is not simply serving; with ``StopOrdered`` the guard's reason counts.
        can_dormant: the engine has not refused to let go of its memory.
        residue_bytes: memory a dormant engine still holds; None = it is not dormant.
        released_bytes: memory it let go of and takes back when it is activated.
        lanes: with two engines in the slot, which of them serve (``rose_engines.node.permit``); the
            rest of the status speaks of the one that is permitted.
        vocabulary: tokens that its model knows; 0 = unknown.
        tokenizer: digest of its model's tokenizer files (``rose_core.wire.tokenizer_files``);
            empty = its folder has none.
        drafts: it was started so that it verifies drafts; not each that is to do so can.
        refuses: parameters of turns that it does not take.
        device_bytes: what it takes of its GPU at most; 0 = not known.
        needs_bytes: what must be lent of each of its GPUs for it to start; of two engines in the
            slot, for one of them. None = unknown, or it takes nothing of a GPU.
        measuring: the host wants to know what its processes hold (``LimitMemory``), to remember it.
        kv_permille: the budget that its elastic KV memory is held to; None = it is not elastic.
        kv_held_bytes: memory of that kind that it holds; None = unknown, or not elastic.
        adapters: where it holds those of several runs; ``version`` and ``head`` are of the first.
    """

    slot: SlotKey
    state: EngineState
    holders: tuple[Holder, ...] = ()
    pids: tuple[int, ...] = ()
    endpoint: str = ""
    version: str = ""
    digest: str = ""
    head: str = ""
    generated_tokens: int = 0
    restarts: int = 0
    reason: HostReason = HostReason.NONE
    message: str = ""
    can_dormant: bool = False
    residue_bytes: int | None = None
    released_bytes: int = 0
    lanes: tuple[int, ...] | None = None
    vocabulary: int = 0
    tokenizer: str = ""
    device_bytes: int = 0
    needs_bytes: int | None = None
    measuring: bool = False
    kv_permille: int | None = None
    kv_held_bytes: int | None = None
    weight_bytes: int = 0
    adapters: tuple[AdapterVersion, ...] = ()
    drafts: bool = False
    refuses: tuple[str, ...] = ()


class HostStatusRequest(msgspec.Struct, frozen=True):
    """Ask for every engine of the host."""


class HostStatus(msgspec.Struct, frozen=True):
    """Every engine the host knows.

    Attributes:
        capabilities: what the host can do, as ``rose_core.devices.capabilities`` names it.
        models: what lies on the node; None before the host has looked.
        certificates: SHA-256 of those with which its data routes answer, now or soon, in hex; empty
            = they are plain HTTP.
    """

    engines: tuple[EngineStatus, ...] = ()
    capabilities: dict[str, str] = {}
    models: tuple[NodeModel, ...] | None = None
    certificates: tuple[str, ...] = ()


class Accepted(msgspec.Struct, frozen=True):
    """The host has taken the order; its effect shows in the status.

    Attributes:
        paused_microseconds: for a hold, time until every thread of the engine stood still.
        turns: for a hold, how many were under way on the data route when it was asked for; None =
            not known.
    """

    paused_microseconds: int = 0
    turns: int | None = None
