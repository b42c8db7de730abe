"""A kubelet that serves PodResources: what it says is set by the test, encoded as protobuf does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import grpc
import grpc.aio

from rose_agent.pods.podresources import METHOD
from rose_core.devices.ownership import DRA_DRIVER, AllocatedDevice, Allocation


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def _field(number: int, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def encode(allocations: Iterable[Allocation]) -> bytes:
    """A ``ListPodResourcesResponse``."""
    return b"".join(_field(1, _pod(one)) for one in allocations)


def _pod(one: Allocation) -> bytes:
    plugins = (device for device in one.devices if device.kind != DRA_DRIVER)
    devices = b"".join(
        _field(2, _field(1, device.kind) + _field(2, device.name)) for device in plugins
    )
    claimed = [device for device in one.devices if device.kind == DRA_DRIVER]
    container = _field(1, "engine") + devices + (_claim(claimed) if claimed else b"")
    return _field(1, one.pod) + _field(2, one.namespace) + _field(3, container)


def _claim(devices: Iterable[AllocatedDevice]) -> bytes:
    """As ``containerManagerImpl.GetDynamicResources`` of 1.36: CDI devices pile up."""
    cdi, reported = b"", _field(1, "claim") + _field(2, "research")
    for device in devices:
        cdi += b"".join(_field(1, _field(1, name)) for name in device.cdi)
        one = cdi + _field(2, device.kind) + _field(3, "node") + _field(4, device.name)
        reported += _field(4, one)
    return _field(5, reported)


class FakeKubelet:
    """The server.

    Attributes:
        allocations: what it says.
        broken: what it answers instead.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.allocations: list[Allocation] = []
        self.broken: bytes | None = None
        self.asked = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve, as after a start of the kubelet."""
        self.socket.unlink(missing_ok=True)
        service, _, name = METHOD.strip("/").partition("/")
        handler = grpc.unary_unary_rpc_method_handler(self._list)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """End."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def _list(self, _request: bytes, _context: object) -> bytes:
        self.asked += 1
        return encode(self.allocations) if self.broken is None else self.broken
