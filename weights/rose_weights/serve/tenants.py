"""Who a store's callers are: tenants, their credentials, and which runs they may publish and read.

A tenant is a team, a trainer, or a serving cluster. Its rights and the *hashes* of its credentials
stand in one file, which ``rose tenant grant`` and ``rose tenant revoke`` write and every store and
relay reads again when it changes, so a credential ends within a second of its revocation. Whoever
reads the file learns no credential.

| a caller shows | it is |
|---|---|
| a credential of the file: ``Authorization: Bearer rose_TENANT_SECRET`` | ``tenant:TENANT`` |
| a certificate | the names in it, and the tenants that list one |
| a service account's token (``Identification``) | ``serviceaccount:NAMESPACE/NAME``, likewise |
| the installation's token | ``installation``: reads every run, publishes none |
| anything else | nobody, and is refused |

Nobody may do what no tenant was granted: an empty file lets nobody in.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import fnmatch
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_weights.errors import BadTenants

INSTALLATION = "installation"
_PREFIX = "rose"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET_BYTES = 32
_ID_LENGTH = 8
# How often the file is looked at; a revocation takes at most this long.
_LOOK_SECONDS = 1.0


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One secret of a tenant, known by its hash.

    Attributes:
        id: names it in ``rose tenant list`` and ``revoke``.
        sha256: of the whole credential, hex. Its 256 random bits need no slow hash.
        created, expires: RFC 3339; no ``expires`` lasts until it is revoked.
    """

    id: str
    sha256: str
    created: dt.datetime
    expires: dt.datetime | None = None

    def is_valid(self, now: dt.datetime) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires


class Tenant(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"
):
    """What one tenant may do, and how it proves who it is.

    What it has not stays out of the file: a store of before a field was added refuses a file that
    has it, and so learns of it first when it is granted.

    Attributes:
        publish, read: runs, as shell patterns.
        record: runs whose sandboxes' records it may keep and read, likewise.
        credentials: issued by ``rose tenant grant``.
        certificates: names in certificates, as shell patterns.
        service_accounts: ``NAMESPACE/NAME``, as shell patterns.
    """

    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    record: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    certificates: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()


class TenantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    tenants: dict[str, Tenant] = {}


def load(path: Path) -> TenantsFile:
    """Read the file; one that is not there yet has no tenant.

    Raises:
        BadTenants: it is no such file; says where it differs.
        OSError: it cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=TenantsFile)
    except FileNotFoundError:
        return TenantsFile()
    except UNREADABLE as error:
        raise BadTenants(f"{path} is no file of tenants: {error}") from error


@contextmanager
def changing(path: Path) -> Iterator[Callable[[TenantsFile], None]]:
    """Change the file under a lock: the block gets a function that writes it in one step."""
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lambda changed: _write(path, changed)


def _write(path: Path, changed: TenantsFile) -> None:
    new = path.with_name(f".{path.name}.new")
    text = msgspec.json.format(msgspec.json.encode(changed), indent=2) + b"\n"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def grant(
    path: Path,
    name: str,
    *,
    publish: tuple[str, ...] = (),
    read: tuple[str, ...] = (),
    record: tuple[str, ...] = (),
    certificates: tuple[str, ...] = (),
    service_accounts: tuple[str, ...] = (),
    lifetime: dt.timedelta | None = None,
    issue: bool = True,
) -> str:
    """Add to a tenant's rights, and issue one credential.

    Args:
        path: the file.
        name: of the tenant, a DNS label.
        publish: runs it may publish, added to those it has.
        read: runs it may read, likewise.
        record: runs whose sandboxes' records it may keep and read, likewise.
        certificates: names in certificates that are this tenant, likewise.
        service_accounts: ``NAMESPACE/NAME`` that are this tenant, likewise.
        lifetime: of the credential; None lasts until it is revoked.
        issue: whether to issue a credential; those with certificates need none.

    Returns:
        The credential, which is nowhere else; empty when none was issued.

    Raises:
        BadTenants: the name is none, or the file is no file of tenants.
    """
    if not _NAME.fullmatch(name):
        raise BadTenants(f"{name!r} is no tenant's name: use a-z, 0-9 and -, at most 63 characters")
    secret, now = "", dt.datetime.now(dt.UTC)
    with changing(path) as write:
        file = load(path)
        before = file.tenants.get(name, Tenant())
        credentials = before.credentials
        if issue:
            secret = f"{_PREFIX}_{name}_{secrets.token_urlsafe(_SECRET_BYTES)}"
            made = Credential(
                secrets.token_hex(_ID_LENGTH // 2),
                _hash(secret),
                now,
                None if lifetime is None else now + lifetime,
            )
            credentials = (*credentials, made)
        tenant = Tenant(
            publish=_joined(before.publish, publish),
            read=_joined(before.read, read),
            record=_joined(before.record, record),
            credentials=credentials,
            certificates=_joined(before.certificates, certificates),
            service_accounts=_joined(before.service_accounts, service_accounts),
        )
        write(TenantsFile({**file.tenants, name: tenant}))
    return secret


def revoke(path: Path, name: str, credential: str = "") -> int:
    """End a tenant, or one credential of it.

    Returns:
        How many credentials have ended.

    Raises:
        BadTenants: there is no such tenant or credential.
    """
    with changing(path) as write:
        file = load(path)
        tenant = file.tenants.get(name)
        if tenant is None:
            known = ", ".join(sorted(file.tenants)) or "none"
            raise BadTenants(f"{path} has no tenant {name!r}; it has: {known}")
        kept = tuple(one for one in tenant.credentials if credential and one.id != credential)
        ended = len(tenant.credentials) - len(kept)
        if credential and not ended:
            known = ", ".join(one.id for one in tenant.credentials) or "none"
            raise BadTenants(f"tenant {name!r} has no credential {credential!r}; it has: {known}")
        others = {other: one for other, one in file.tenants.items() if other != name}
        if credential:
            others[name] = msgspec.structs.replace(tenant, credentials=kept)
        write(TenantsFile(others))
    return ended


def _joined(before: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*before, *more)))


def _hash(credential: str) -> str:
    return hashlib.sha256(credential.encode(errors="replace")).hexdigest()


class Tenants:
    """The file as a store sees it; read again when it has changed.

    Used from one event loop. A file that cannot be read, or is none, leaves what was known before:
    nobody is let in by it, and nobody is thrown out by a slip of the pen; ``problem`` says so.

    Args:
        path: the file.
        clock: seconds, for how often the file is looked at.
        now: the time of day, for credentials that expire.

    Attributes:
        problem: why the file could not be read last; empty when it could.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._path, self._clock, self._now = path, clock, now
        self._file = load(path)
        self._seen = _stamp(path)
        self._looked = clock()
        self._by_hash = _by_hash(self._file)
        self.problem = ""

    def tenant_of(self, credential: str) -> str:
        """The tenant that this credential is one of now; empty if it is nobody's."""
        self._look()
        name, known = self._by_hash.get(_hash(credential), ("", None))
        return name if known is not None and known.is_valid(self._now()) else ""

    def named(self, name: str) -> Iterator[tuple[str, Tenant]]:
        """Tenants that a name of a caller stands for: its own, a certificate's, an account's."""
        self._look()
        kind, _, rest = name.partition(":")
        for tenant, rights in self._file.tenants.items():
            accounts = rights.service_accounts if kind == "serviceaccount" else ()
            if (
                name == f"tenant:{tenant}"
                or any(fnmatch.fnmatchcase(rest, one) for one in accounts)
                or any(fnmatch.fnmatchcase(name, one) for one in rights.certificates)
            ):
                yield tenant, rights

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        seen = _stamp(self._path)
        if seen == self._seen:
            return
        try:
            self._file = load(self._path)
        except (BadTenants, OSError) as error:
            self.problem = str(error)
            return
        self._seen, self.problem = seen, ""
        self._by_hash = _by_hash(self._file)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


def _by_hash(file: TenantsFile) -> dict[str, tuple[str, Credential]]:
    return {
        one.sha256: (name, one)
        for name, tenant in file.tenants.items()
        for one in tenant.credentials
    }
