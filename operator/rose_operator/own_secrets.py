"""The installation's token, authorities and certificate: made here once, renewed in time.

The chart makes these Secrets without content, and gives the operator the right to read and to
change them by name. So a rendering is the same every time (Argo CD, Flux, ``helm template``),
and nothing in it is secret.

| Secret | keys | who has it |
|---|---|---|
| token | ``token`` | operator, agents, relay |
| authority | a pair, and the bundle | the operator alone |
| certificate | a pair, and the authority's bundle | who listens; of it the bundle: who dials |
| node authority | a pair, and the bundle | the operator; of it the bundle: who listens to nodes |
| router authority | a pair, and the bundle | the operator alone, which tells whom it concerns |

A pair is ``tls.crt`` and ``tls.key``, the bundle ``ca.crt``; ``next.crt`` and ``next.key`` are an
authority's successor. When what is due: ``rose_core.rotation``.

Every operator does this, also one that does not lead, because none can listen before. Two at once
are told apart by the API server (409): the second takes what the first has made. The operator
reads its own copies from files, as if the kubelet had mounted them, only sooner.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime as dt
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose_core import rotation
from rose_core.rotation import HeldAuthority, HeldLeaf, RotationStep, ValidityWindow
from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_wire import certificates, flags, tls

_log = logging.getLogger(__name__)

TOKEN = "token"  # noqa: S105  # a key
NEXT_CERTIFICATE, NEXT_KEY = "next.crt", "next.key"
FOLDERS = {
    "token": "token",
    "authority": "authority",
    "certificate": "tls",
    "nodes": "nodes",
    "routers": "routers",
}

_RETRY_SECONDS = 1.0
_TOKEN_BYTES = 36

Files = dict[str, bytes]


class SecretApi(Protocol):
    """What is asked of the API server."""

    async def get(self, kind: ObjectKind, name: str) -> Raw | None:
        """One object of ROSE's namespace."""

    async def replace(self, kind: ObjectKind, manifest: Raw) -> Raw:
        """Replace it if nobody else has meanwhile."""


@dataclass(frozen=True)
class SecretOptions:
    """Which Secrets the operator makes; an empty name: the platform does.

    Attributes:
        folder: where it keeps its own copies.
        names: what its listeners' certificate is good for.
        authority_days, certificate_days: how long they are good.
        look_seconds: between two looks at them.
    """

    folder: Path
    token: str = ""
    authority: str = ""
    certificate: str = ""
    nodes: str = ""
    routers: str = ""
    names: tuple[str, ...] = ()
    authority_days: float = 3650.0
    certificate_days: float = 90.0
    look_seconds: float = 60.0  # four small objects; what has to be renewed has weeks


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``SecretOptions``."""
    add = parser.add_argument
    add("--own-secrets-dir", type=Path, help="where the operator keeps what it makes itself")
    add("--own-token", default="", help="Secret in which it makes the token")
    add("--own-authority", default="", help="Secret in which it makes the listeners' authority")
    add("--own-certificate", default="", help="Secret in which it makes their certificate")
    add("--own-node-authority", default="", help="Secret in which it makes the nodes' authority")
    add(
        "--own-router-authority", default="", help="Secret in which it makes the routers' authority"
    )
    add("--own-names", default="", help="host names of that certificate, comma separated")
    add("--own-authority-days", type=flags.above_zero, default=3650.0, help="life of authorities")
    add(
        "--own-certificate-days",
        type=flags.above_zero,
        default=90.0,
        help="life of the certificate",
    )
    add(
        "--own-look-seconds",
        type=flags.above_zero,
        default=60.0,
        help="time between two looks at these Secrets",
    )


def options(argv: list[str]) -> SecretOptions | None:
    """What the flags ask for; None where the operator makes none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    found, _ = parser.parse_known_args(argv)
    if found.own_secrets_dir is None:
        return None
    return SecretOptions(
        folder=found.own_secrets_dir,
        token=found.own_token,
        authority=found.own_authority,
        certificate=found.own_certificate,
        nodes=found.own_node_authority,
        routers=found.own_router_authority,
        names=tuple(filter(None, found.own_names.split(","))),
        authority_days=found.own_authority_days,
        certificate_days=found.own_certificate_days,
        look_seconds=found.own_look_seconds,
    )


class OwnSecrets:
    """Keeps the Secrets filled and the operator's own copies fresh.

    Args:
        api: of the installation's namespace.
        wanted: which Secrets.
        wall: Unix seconds.
    """

    def __init__(self, api: SecretApi, wanted: SecretOptions, *, wall: Callable[[], float]) -> None:
        self._api = api
        self._wanted = wanted
        self._wall = wall
        self._written: dict[str, Files] = {}

    async def make(self) -> None:
        """Until everything is there; the API server may come up later than we do.

        Raises:
            ApiRefused: a Secret is missing, or the right to change it; says which.
        """
        while True:
            try:
                await self.refresh()
            except ApiUnavailable as error:
                _log.warning("own secrets: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def keep(self) -> None:
        """Renew in time, and take over what other replicas made, until cancelled."""
        while True:
            await asyncio.sleep(self._wanted.look_seconds)
            try:
                await self.refresh()
            except (ApiUnavailable, ApiRefused, OSError) as error:
                _log.warning("own secrets: %s", error)

    async def refresh(self) -> None:
        """One look at every Secret.

        Raises:
            ApiUnavailable: ask again.
            ApiRefused: a Secret is missing, or a right.
        """
        wanted = self._wanted
        if wanted.token:
            await self._one("token", wanted.token, _token)
        if wanted.nodes:
            await self._one("nodes", wanted.nodes, self._authority("rose-nodes"))
        if wanted.routers:
            await self._one("routers", wanted.routers, self._authority("rose-routers"))
        if not wanted.certificate:
            return
        signer = await self._one("authority", wanted.authority, self._authority("rose"))
        await self._one("certificate", wanted.certificate, lambda held: self._leaf(held, signer))

    async def _one(self, what: str, name: str, change: Callable[[Files], Files]) -> Files:
        """Read, change if due, write, and keep a copy."""
        raw = await self._api.get(ObjectKind.SECRET, name)
        if raw is None:
            message = f"there is no Secret {name}; apply the chart again, which makes it"
            raise ApiRefused(404, message)
        held = {key: base64.b64decode(text) for key, text in (raw.get("data") or {}).items()}
        files = change(held)
        if files != held:
            data = {key: base64.b64encode(content).decode() for key, content in files.items()}
            # Its resource version goes along: who comes second gets 409, and looks again.
            await self._api.replace(ObjectKind.SECRET, raw | {"data": data})
            _log.info("Secret %s: made or renewed", name)
        if self._written.get(what) != files:
            certificates.keep(self._wanted.folder / FOLDERS[what], files)
            self._written[what] = files
        return files

    def _authority(self, common_name: str) -> Callable[[Files], Files]:
        return lambda held: turned(
            held, common_name, dt.timedelta(days=self._wanted.authority_days), self._wall()
        )

    def _leaf(self, held: Files, signer: Files) -> Files:
        now = self._wall()
        files = dict(held)
        if rotation.is_due(_held_leaf(held, signer[tls.CERTIFICATE], self._wanted.names), now):
            pair = signer[tls.KEY], signer[tls.CERTIFICATE]
            life = dt.timedelta(days=self._wanted.certificate_days)
            files[tls.KEY], files[tls.CERTIFICATE] = certificates.issue(
                self._wanted.names, pair, life, dt.datetime.fromtimestamp(now, dt.UTC)
            )
        return files | {tls.BUNDLE: signer[tls.BUNDLE]}


def turned(held: Files, common_name: str, life: dt.timedelta, now: float) -> Files:
    """An authority's files after every step that is due now."""
    files = dict(held)
    while (step := rotation.decide(_held_authority(files), now)) is not RotationStep.NONE:
        when = dt.datetime.fromtimestamp(now, dt.UTC)
        if step is RotationStep.MAKE:
            key, certificate = certificates.make_authority(common_name, life, when)
            files = {tls.KEY: key, tls.CERTIFICATE: certificate, tls.BUNDLE: certificate}
        elif step is RotationStep.PREPARE:
            files[NEXT_KEY], files[NEXT_CERTIFICATE] = certificates.make_authority(
                common_name, life, when
            )
            files[tls.BUNDLE] += files[NEXT_CERTIFICATE]
        elif step is RotationStep.SWITCH:
            files[tls.KEY], files[tls.CERTIFICATE] = (
                files.pop(NEXT_KEY),
                files.pop(NEXT_CERTIFICATE),
            )
        elif step is RotationStep.DROP:
            living = [
                one for one in certificates.split(files[tls.BUNDLE]) if _window(one).ends > now
            ]
            files[tls.BUNDLE] = b"".join(living)
    return files


def _held_authority(files: Files) -> HeldAuthority:
    """What the files hold; one that does not sign or is not believed counts as nothing."""
    try:
        certificates.check_authority(files[tls.KEY], files[tls.CERTIFICATE])
        bundle = certificates.split(files[tls.BUNDLE])
        signer = _window(files[tls.CERTIFICATE])
        following = _successor(files)
    except (KeyError, ValueError):
        return HeldAuthority()
    names = (files[tls.CERTIFICATE], files.get(NEXT_CERTIFICATE, b""))
    if files[tls.CERTIFICATE] not in bundle:
        return HeldAuthority()
    former = tuple(_window(one) for one in bundle if one not in names)
    return HeldAuthority(signer, following, following.begins if following else 0.0, former)


def _successor(files: Files) -> ValidityWindow | None:
    if NEXT_CERTIFICATE not in files:
        return None
    certificates.check_authority(files[NEXT_KEY], files[NEXT_CERTIFICATE])
    return _window(files[NEXT_CERTIFICATE])


def _held_leaf(held: Files, authority: bytes, names: tuple[str, ...]) -> HeldLeaf | None:
    try:
        certificate = held[tls.CERTIFICATE]
        return HeldLeaf(
            _window(certificate),
            by_signer=certificates.is_signed_by(certificate, authority) and tls.KEY in held,
            names_wanted=certificates.names_of(certificate) == names,
        )
    except (KeyError, ValueError):
        return None


def _token(held: Files) -> Files:
    """A token that is there stays: everybody has it."""
    if held.get(TOKEN, b"").strip():
        return held
    return held | {TOKEN: secrets.token_urlsafe(_TOKEN_BYTES).encode()}


def _window(certificate: bytes) -> ValidityWindow:
    return ValidityWindow(*certificates.window(certificate))
