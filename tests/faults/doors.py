"""What listens, and what each of its verbs answers a caller with this credential or none."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp
import grpc
import msgspec
import psutil

from rose_core.delta.manifest import Manifest
from rose_core.delta.parts import RankPart
from rose_core.identity import WeightVersion
from rose_router.errors import REASON
from rose_weights import methods as weight_plane
from rose_wire import services
from rose_wire.method import Method, encode

_SECONDS = 4.0
# An answer that took this long is one; refusals are at once, but for a machine that is busy.
_PATIENT_SECONDS = 40.0
METHODS: dict[str, Method[Any, Any]] = {
    found.path: found
    for module in (services, weight_plane)
    for found in vars(module).values()
    if isinstance(found, Method)
}
RUN = "team-run"
"""The run that every message is about."""
_VERSION = WeightVersion(RUN, 1, 1)
_BYTES = {
    "manifest": Manifest(target=_VERSION, digest="0" * 32, tensors=(), tiles=b"").encode(),
    "part": encode(
        RankPart(target=_VERSION, rank=0, world=1, tensors=(), tiles=(), digests=b"", blocks=())
    ),
}


def listeners(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which these processes listen."""
    found = set()
    for pid in pids:
        for one in psutil.Process(pid).net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return sorted(found)


@dataclass
class Knocked:
    """What one port answered a caller.

    Attributes:
        answered: every verb that the port's protocol has.
        let_in: those that did more than refuse.
        bodies: verb -> text of those that answered 200.
    """

    answered: set[str] = field(default_factory=set)
    let_in: set[str] = field(default_factory=set)
    bodies: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trust:
    """What a caller over TLS knows and shows.

    Attributes:
        authority: certificate of the installation's, PEM.
        name: that the listener's certificate is good for.
        own: key and certificate of its own, PEM; None = it has none.
    """

    authority: bytes
    name: str
    own: tuple[bytes, bytes] | None = None


async def knock(
    place: int | str,
    token: str,
    verbs: Iterable[str],
    trust: Trust | None = None,
    name: str = "x",
) -> Knocked:
    """Try verbs at a port of this machine or a HOST:PORT, with this bearer token or none.

    With ``trust``, gRPC is tried over TLS, and a handshake that fails is a refusal. ``name`` stands
    in paths where the table has a place for one.
    """
    place = f"127.0.0.1:{place}" if isinstance(place, int) else place
    found = Knocked()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = sorted(verbs)
    timeout = aiohttp.ClientTimeout(total=_PATIENT_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        for verb in asked:
            if " /" in verb:
                await _page(http, place, verb, found, name)
    if not found.answered:
        async with dialled(place, trust) as channel:
            for verb in asked:
                if verb in METHODS:
                    found.answered.add(verb)
                    if await _is_heard(channel, METHODS[verb], token, trust):
                        found.let_in.add(verb)
    return found


def dialled(place: str, trust: Trust | None) -> grpc.aio.Channel:
    """A channel to HOST:PORT."""
    if trust is None:
        return grpc.aio.insecure_channel(place)
    credentials = grpc.ssl_channel_credentials(trust.authority, *(trust.own or ()))
    return grpc.aio.secure_channel(
        place, credentials, options=(("grpc.ssl_target_name_override", trust.name),)
    )


async def _page(
    http: aiohttp.ClientSession, place: str, verb: str, found: Knocked, name: str
) -> None:
    method, _, path = verb.partition(" ")
    method = "GET" if method == "*" else method
    where = f"{place}{re.sub('{.*?}', name, path)}"
    body: dict[str, str] | None = {} if method == "POST" else None
    for scheme in ("http", "https"):
        try:
            # Whoever is there shows a certificate that only routers are told of.
            url = f"{scheme}://{where}"
            async with http.request(method, url, json=body, ssl=False) as answer:
                text = (await answer.read()).decode(errors="replace")  # some answer in frames
            break
        except aiohttp.ClientError:
            continue
    else:
        return  # it speaks something else
    found.answered.add(verb)
    # A route that looked for something of that name and knows none was open.
    looked = answer.headers.get(REASON, "").startswith("Unknown")
    if looked or answer.status not in {401, 403, 404, 405}:
        found.let_in.add(verb)
    if answer.status == 200:
        found.bodies[verb] = text


async def _is_heard(
    channel: grpc.aio.Channel, method: Method[Any, Any], token: str, trust: Trust | None
) -> bool:
    code, words = await _call(channel, method, token, _SECONDS)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        code, words = await _call(channel, method, token, _SECONDS * 2)
    closed = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    closed |= {grpc.StatusCode.UNAVAILABLE} if trust is not None else set()
    return code not in closed and "Forbidden" not in words


async def _call(
    channel: grpc.aio.Channel, method: Method[Any, Any], token: str, seconds: float
) -> tuple[grpc.StatusCode, str]:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    frame = encode(filled(method.request))
    call = channel.unary_unary(method.path)(frame, metadata=metadata, timeout=seconds)
    code, reported = await call.code(), str(await call.details())
    # A stream of answers has its refusals in them.
    return code, reported if code is not grpc.StatusCode.OK else repr(await call)


def filled(kind: Any) -> Any:  # noqa: ANN401, PLR0911  # any type of a message's field
    """The least message of a type: whoever may send it, is refused for what it says at most."""
    origin = typing.get_origin(kind)
    if origin in {typing.Union, types.UnionType}:
        return filled(typing.get_args(kind)[0])
    if origin is typing.Annotated:
        return filled(typing.get_args(kind)[0])
    if origin is not None:
        return origin()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        wanted = {one.name: one for one in msgspec.structs.fields(kind)}
        return kind(
            **{
                name: RUN if name == "run" else _BYTES.get(name) or filled(one.type)
                for name, one in wanted.items()
                if one.required or name == "run"
            }
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if kind is type(None):
        return None
    if isinstance(kind, typing.NewType):
        return filled(kind.__supertype__)
    return "x" if kind is str else kind()
