"""What the kubelet has allocated to the pods of this node, by its PodResources API (v1).

The kubelet serves gRPC on a Unix socket of the node. Only ``List`` is called, with an empty
request, and of its answer only names and devices are read. That takes a few messages of a stable
API, so they are read here from protobuf's wire format, as its specification describes it, instead
of bringing a compiler and a runtime for them.

| seen | then |
|---|---|
| an answer | it counts until the next one |
| no answer any more | the last one counts: the kubelet is away, so nothing new is admitted either |
| never an answer | ``problem`` says why; ``rose_agent.pods.claims`` falls back, which is weaker |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio

from rose_agent.errors import AgentError
from rose_core.devices.ownership import AllocatedDevice, Allocation

_log = logging.getLogger(__name__)

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
METHOD = "/v1.PodResourcesLister/List"
PERIOD_SECONDS = 2.0
_TIMEOUT_SECONDS = 5.0
# What the kubelet's own clients allow: a node of 500 pods with many devices stays below 1 MiB.
_MOST_BYTES = 16 << 20
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


class MalformedAnswer(AgentError):
    """The kubelet's answer is not what its API says."""


class PodResources:
    """Keeps the last answer.

    Args:
        socket: the kubelet's.
        on_change: called when the answer is another than the one before.

    Attributes:
        allocations: of every pod; None = the kubelet has never answered.
        problem: why it did not answer last; empty when it did.
    """

    def __init__(self, socket: Path = SOCKET, on_change: Callable[[], None] = lambda: None) -> None:
        self._socket = socket
        self._on_change = on_change
        self.allocations: tuple[Allocation, ...] | None = None
        self.problem = "the kubelet has not been asked yet"
        self.asked = False

    async def run(self) -> None:
        """Ask until cancelled."""
        options = [
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.default_authority", "localhost"),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            ask = channel.unary_unary(METHOD)
            while True:
                await self._look(ask)
                await asyncio.sleep(PERIOD_SECONDS)

    async def _look(self, ask: Callable[..., grpc.aio.UnaryUnaryCall[bytes, bytes]]) -> None:
        try:
            self._socket.stat()
            found = read(await ask(b"", timeout=_TIMEOUT_SECONDS))
        except (grpc.aio.AioRpcError, MalformedAnswer, OSError) as error:
            self._note_failure(error)
            return
        changed = found != self.allocations or not self.asked
        if self.problem:
            _log.info("the kubelet names the GPUs of %d pods", _holders(found))
        self.allocations, self.problem, self.asked = found, "", True
        if changed:
            self._on_change()

    def _note_failure(self, error: Exception) -> None:
        message = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        problem = f"the kubelet does not answer at {self._socket}: {message}"
        if problem != self.problem:
            _log.warning("%s", problem)
        first = not self.asked
        self.problem, self.asked = problem, True
        if first:
            self._on_change()


def _holders(allocations: tuple[Allocation, ...]) -> int:
    return sum(bool(allocation.devices) for allocation in allocations)


def read(answer: bytes) -> tuple[Allocation, ...]:
    """Read a ``ListPodResourcesResponse``; pods without devices are left out.

    Raises:
        MalformedAnswer: it is not one.
    """
    try:
        pods = [_pod(pod) for number, pod in _fields(answer) if number == 1]
    except (IndexError, UnicodeDecodeError) as error:
        raise MalformedAnswer(f"the kubelet's answer cannot be read: {error}") from error
    return tuple(pod for pod in pods if pod.devices)


def _pod(data: bytes) -> Allocation:
    """``PodResources``: name 1, namespace 2, containers 3."""
    names, devices = {1: "", 2: ""}, list[AllocatedDevice]()
    for number, value in _fields(data):
        if number in names:
            names[number] = value.decode()
        elif number == 3:
            devices.extend(_container(value))
    return Allocation(names[2], names[1], tuple(devices))


def _container(data: bytes) -> Iterator[AllocatedDevice]:
    """``ContainerResources``: devices 2, dynamic_resources 5 (claim_resources 4)."""
    for number, value in _fields(data):
        if number == 2:
            yield from _plugin_devices(value)
        elif number == 5:
            yield from _claim(value)


def _plugin_devices(data: bytes) -> Iterator[AllocatedDevice]:
    """``ContainerDevices``: resource_name 1, device_ids 2."""
    kind, names = "", list[str]()
    for number, value in _fields(data):
        if number == 1:
            kind = value.decode()
        elif number == 2:
            names.append(value.decode())
    return (AllocatedDevice(kind, name) for name in names)


def _claim(data: bytes) -> Iterator[AllocatedDevice]:
    """``DynamicResource``: claim_resources 4.

    The kubelet (seen in 1.36) lists at each device the CDI devices of all that come before it in
    the claim, too. Unless they are taken away, each device of a claim looks like its first one.
    """
    before: dict[str, tuple[str, ...]] = {}
    for number, value in _fields(data):
        if number == 4:
            listed = _claimed(value)
            earlier = before.get(listed.kind, ())
            repeated = listed.cdi[: len(earlier)] == earlier
            before[listed.kind] = listed.cdi
            yield replace(listed, cdi=listed.cdi[len(earlier) :]) if repeated else listed


def _claimed(data: bytes) -> AllocatedDevice:
    """``ClaimResource``: cdi_devices 1 (name 1), driver_name 2, pool_name 3, device_name 4."""
    kind, name, cdi = "", "", list[str]()
    for number, value in _fields(data):
        if number == 1:
            cdi.extend(inner.decode() for at, inner in _fields(value) if at == 1)
        elif number == 2:
            kind = value.decode()
        elif number == 4:
            name = value.decode()
    return AllocatedDevice(kind, name, tuple(cdi))


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Fields of a message that are texts or messages, in order; numbers are passed over.

    Raises:
        IndexError, MalformedAnswer: it is cut off, or has a wire type that protobuf 3 has not.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            _, at = _varint(data, at)
        elif wire in {_EIGHT, _FOUR}:
            at += 8 if wire == _EIGHT else 4
        elif wire == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise MalformedAnswer("the kubelet's answer is cut off")
            yield key >> 3, data[at : at + size]
            at += size
        else:
            raise MalformedAnswer(f"the kubelet's answer has wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise MalformedAnswer("the kubelet's answer has a number of more than 64 bits")
