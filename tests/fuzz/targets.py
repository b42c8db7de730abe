"""What reads the bytes of strangers, one function each: bytes in, nothing raised but a refusal.

Strangers are serving pods (what the guard and the tap read of them), callers of a router, and
whoever reaches a store's port. A target says what must hold for *every* input. ``run`` lets a
coverage-guided fuzzer (libFuzzer, by ``atheris``) look for one that breaks it; ``test_corpus``
tries what was found before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from rose_agent.devices import owners
from rose_agent.pods import processes
from rose_agent.pods.claims import GPU_ANNOTATION, WrittenClaims
from rose_agent.pods.kubernetes import (
    FEED_ANNOTATION,
    GROUP_INDEX_LABEL,
    GROUP_NAME_LABEL,
    GROUP_SIZE_ANNOTATION,
    STOP_ANNOTATION,
    WORKER_INDEX_LABEL,
    Access,
    KubernetesPods,
)
from rose_agent.signals.messages import WireFigures, replies
from rose_agent.signals.snapshot import mapped
from rose_agent.signals.zmtp import Subscription
from rose_agent.tap import packets
from rose_core.delta.bits import number_format
from rose_core.delta.codec import decode_block
from rose_core.delta.errors import DeltaError
from rose_core.identity import GpuUuid, PodUid
from rose_core.rollouts.errors import RolloutError
from rose_core.telemetry import dialects
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.tracker import Tracker
from rose_core.wire.sync import PoolPolicy
from rose_router.errors import RouterError
from rose_router.http.admission.bodies import json_object
from rose_router.http.admission.memory import held_by
from rose_router.http.dialects import chat, completions, sglang, vllm
from rose_router.http.dialects.terms import MOST_ANSWERS
from rose_weights import methods as weight_plane
from rose_weights.errors import WeightsError
from rose_weights.serve.responses import run_of
from rose_weights.store.sharded_parts import run_of_part
from rose_wire import services
from rose_wire.cgroups import paths_by_controller
from rose_wire.errors import MalformedMessage
from rose_wire.method import Method, decode

Target = Callable[[bytes], None]
_PORT = 30000
# A request's bookkeeping in the tap: far below what an input of this size could ask for.
_MOST_EVENTS_A_BYTE = 2
METHODS = [
    found
    for module in (services, weight_plane)
    for found in vars(module).values()
    if isinstance(found, Method)
]
_TILE = 4096
_BASE = np.arange(_TILE, dtype=np.uint16)


def _is_bounded(figures: Figures) -> None:
    """It fits the guard's types, or is unknown."""
    assert WireFigures.of(figures) is not None


def sglang_metrics(data: bytes) -> None:
    """SGLang's ``/metrics``."""
    _is_bounded(dialects.sglang_metrics(data.decode("utf-8", "replace")))


def vllm_metrics(data: bytes) -> None:
    """VLLM's ``/metrics``."""
    _is_bounded(dialects.vllm_metrics(data.decode("utf-8", "replace")))


def sglang_loads(data: bytes) -> None:
    """SGLang's load page."""
    _is_bounded(dialects.sglang_loads(data))


def vllm_load(data: bytes) -> None:
    """VLLM's load page."""
    _is_bounded(dialects.vllm_load(data))


def sglang_snapshot(data: bytes) -> None:
    """SGLang's load snapshot in shared memory."""
    _is_bounded(dialects.sglang_snapshot(data))


def sglang_feed(data: bytes) -> None:
    """A message of SGLang's load feed."""
    _is_bounded(dialects.sglang_feed(data))


def maps(data: bytes) -> None:
    """A ``/proc/PID/maps`` text, whose paths the pod chose."""
    path = mapped(data.decode("utf-8", "replace"))
    assert path is None or "sglang_loads_" in path


_POD = PodUid("53099174-d551-433b-9350-adf44bee898e")


def pod_processes(data: bytes) -> None:
    """What the kernel shows of a process of a pod: its cgroups, in which a container has a say."""
    cgroup = data.decode("utf-8", "replace")
    owner = owners.parse(cgroup)
    assert len(owner.pod) in {0, len(_POD)}
    assert processes.container_id(cgroup) in {"", *re.findall("[0-9a-f]{64}", cgroup)}
    for path in paths_by_controller(cgroup).values():
        assert str(path)


_ANNOTATIONS = (FEED_ANNOTATION, GROUP_SIZE_ANNOTATION, GPU_ANNOTATION, STOP_ANNOTATION)
_LABELS = (GROUP_NAME_LABEL, GROUP_INDEX_LABEL, WORKER_INDEX_LABEL)
_GUARDED = KubernetesPods(
    Access("", Path(), None), "node", lambda: None, WrittenClaims(lambda: (GpuUuid("GPU-0"),))
)


def pod_annotations(data: bytes) -> None:
    """What a pod's owner has written on it: annotations and labels that the guard reads."""
    texts = [piece.decode("utf-8", "replace") for piece in _pieces(data)]
    written = dict(zip((*_ANNOTATIONS, *_LABELS), texts, strict=False))
    meta = {"uid": _POD, "namespace": "n", "name": "p", "annotations": written, "labels": written}
    policy = PoolPolicy("n/pool", "Lend", {}, _PORT)
    found = _GUARDED._describe({"metadata": meta}, policy, 0, frozenset())
    assert 0 <= found.feed_port < 65536
    assert 0 < found.group_size < 10_000
    assert len(found.gpu_uuids) <= 64
    assert len(found.claim.message) < 1000
    assert bool(found.claim.refusal) == bool(found.claim.message)


def reader_reply(data: bytes) -> None:
    """What a reader says to the guard: refused, or within bounds."""
    try:
        replies.decode(data)
    except msgspec.MsgspecError:
        return


def zmtp(data: bytes) -> None:
    """A publisher's bytes: a message, or a refusal that says why."""

    async def talk() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        subscription = Subscription(stream, _Nowhere())  # type: ignore[arg-type]  # nobody listens
        try:
            await subscription._handshake(b"load")
            while True:
                await subscription.receive()
        except (ValueError, asyncio.IncompleteReadError):
            return

    asyncio.run(talk())


class _Nowhere:
    """A writer without a peer."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""


def tap_packets(data: bytes) -> None:
    """Packets as the tap captures them: any bytes are segments of one replica, or passed over."""
    numbers = itertools.count(1)
    tracker = Tracker(PodUid("replica"), lambda: next(numbers))
    made = 0
    for time_ns, packet in enumerate(_pieces(data)):
        segment = packets.decode(packet, _PORT, time_ns * 1_000_000)
        if segment is not None:
            made += len(tracker.feed(segment))
    assert made <= _MOST_EVENTS_A_BYTE * len(data)


def tap_streams(data: bytes) -> None:
    """Both directions of one connection, byte for byte the pod's and its clients'."""
    numbers = itertools.count(1)
    tracker = Tracker(PodUid("replica"), lambda: next(numbers))
    sequence = {True: 1000, False: 5000}
    for time_ns, piece in enumerate(_pieces(data)):
        to_server, body = bool(piece[:1] and piece[0] & 1), piece[1:]
        header = _tcp(sequence[to_server], to_server=to_server) + body
        segment = packets.decode(header, _PORT, time_ns * 1_000_000)
        assert segment is not None
        tracker.feed(segment)
        sequence[to_server] = (sequence[to_server] + len(body)) % 2**32


_DIALECTS = (sglang.read, completions.read, chat.read, vllm.read)


def router_requests(data: bytes) -> None:
    """A turn's request: the first byte is the dialect, the rest the body."""
    read = _DIALECTS[(data[:1] or b"\0")[0] % len(_DIALECTS)]
    numbers = itertools.count(1)
    try:
        body = json_object(data[1:])
        asked = read(body, {}, None, lambda: f"r{next(numbers)}")
    except (RolloutError, RouterError):
        return
    assert 0 < len(asked.turns) <= MOST_ANSWERS
    assert held_by(asked.turns) > 0


def router_headers(data: bytes) -> None:
    """The headers that say where a turn belongs: name and value per line."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")  # as aiohttp does
    headers = dict(line.split(":", 1) for line in lines if ":" in line)
    with contextlib.suppress(RolloutError, RouterError):
        asked = sglang.read({"input_ids": [1]}, headers, None, lambda: "r")
        for turn in asked.turns:  # it can be told to others
            msgspec.json.encode([turn.trajectory, turn.hint.group, turn.job])


def wire_messages(data: bytes) -> None:
    """A gRPC message of any method, as its server reads it: the first byte is the method."""
    method = METHODS[(data[:1] or b"\0")[0] % len(METHODS)]
    with contextlib.suppress(MalformedMessage):
        decode(method.request, data[1:])


def store_manifests(data: bytes) -> None:
    """What a publisher calls its manifest, or one rank's part of it."""
    with contextlib.suppress(WeightsError):
        run_of(data)
    with contextlib.suppress(WeightsError):
        run_of_part(data)


def store_blocks(data: bytes) -> None:
    """What a publisher calls a block: of a tile of 4,096 elements of 16 bits."""
    with contextlib.suppress(DeltaError):
        decode_block(data, number_format("BF16"), _TILE, "numpy", base=_BASE)


def _tcp(sequence: int, *, to_server: bool) -> bytes:
    """IPv4 and TCP heads; a total of 0 lets what was captured count."""
    ours, theirs = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
    ends = theirs + ours if to_server else ours + theirs
    ports = (40000, _PORT) if to_server else (_PORT, 40000)
    ip = b"\x45\0\0\0" + bytes(5) + b"\x06" + bytes(2) + ends
    tcp = b"".join(port.to_bytes(2) for port in ports) + sequence.to_bytes(4) + bytes(4)
    return ip + tcp + b"\x50\x10" + bytes(6)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut by a length of two bytes before each piece, as libFuzzer learns to write them."""
    while len(data) > 2:
        size = int.from_bytes(data[:2])
        yield data[2 : 2 + size]
        data = data[2 + size :]


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        sglang_metrics,
        vllm_metrics,
        sglang_loads,
        vllm_load,
        sglang_snapshot,
        sglang_feed,
        maps,
        pod_processes,
        pod_annotations,
        reader_reply,
        zmtp,
        tap_packets,
        tap_streams,
        router_requests,
        router_headers,
        wire_messages,
        store_manifests,
        store_blocks,
    )
}
