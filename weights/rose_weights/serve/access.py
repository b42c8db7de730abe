"""Who a caller is, and which runs it may publish and read; deny by default.

| a caller is (``tenants``) | its rights come from |
|---|---|
| ``tenant:NAME``, or a name that a tenant lists | the file of tenants (``--tenants``) |
| a name in a certificate | a JSON file (``--access``): name -> rights, as shell patterns |
| ``installation`` | built in: reads every run, publishes none |

A file of ``--access``::

    {
      "spiffe://train/grpo": {"publish": ["grpo*"], "read": ["*"]},
      "relay.serving": {"read": ["grpo*"]},
      "hosts.train": {"record": ["grpo*"]}
    }

``record`` is a right of its own: to keep and read the records of a run's sandboxes, and nothing of
its weights. Nobody has it by one of the others.

Blocks are named by their content and have no run: who may read some run may fetch a block whose
name it knows, and such a name is known from the manifest of a run alone. Next step: ``service``
asks here before it does anything.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_weights.errors import Forbidden
from rose_weights.serve.tenants import INSTALLATION, Tenants
from rose_wire.bearer import is_bearer
from rose_wire.service_accounts import ServiceAccounts

Right = Literal["publish", "read", "record"]

AUDIENCE = "rose-weights"
# Names that only this module gives; a certificate that bears one proves nothing by it.
_OURS = ("tenant:", "serviceaccount:", INSTALLATION)


class AccessRights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one name may do; runs as shell patterns."""

    publish: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    record: tuple[str, ...] = ()

    def allow(self, right: Right, run: str | None) -> bool:
        """Whether a run is among them; None asks for any run at all."""
        patterns: tuple[str, ...] = getattr(self, right)
        if run is None:
            return bool(patterns)
        return any(fnmatch.fnmatchcase(run, pattern) for pattern in patterns)


_READER = AccessRights(read=("*",))
OPEN: Mapping[str, AccessRights] = {"": AccessRights(publish=("*",), read=("*",), record=("*",))}
"""Everybody may do everything: for services that only this machine reaches."""


class StoreAccess:
    """The rules of one service.

    Args:
        rules: name in a certificate, as a shell pattern -> rights; ``OPEN`` lets everybody do all.
        tenants: of ``--tenants``; None knows none.
    """

    def __init__(
        self, rules: Mapping[str, AccessRights] | None = None, tenants: Tenants | None = None
    ) -> None:
        self._rules = rules or {}
        self._tenants = tenants

    @classmethod
    def load(cls, path: Path, tenants: Tenants | None = None) -> StoreAccess:
        """Read the file of ``--access``.

        Raises:
            ValueError: it is no such file; says where it differs.
            OSError: it cannot be read.
        """
        try:
            rules = msgspec.json.decode(path.read_bytes(), type=dict[str, AccessRights])
        except UNREADABLE as error:
            message = f"{path} does not say who may do what: {error}"
            raise ValueError(message) from error
        return cls(rules, tenants)

    def allows(self, names: Iterable[str], right: Right, run: str | None) -> bool:
        """Whether one of the caller's names may; a ``run`` of None asks for any run at all."""
        if self._rules is OPEN:
            return True
        return any(rights.allow(right, run) for rights in self._of(names))

    def check(self, names: Iterable[str], right: Right, run: str | None) -> None:
        """Refuse who may not.

        Args:
            names: of the caller, from its credential and its certificate.
            right: what it wants to do.
            run: with which run; None = with blocks.

        Raises:
            Forbidden: none of the names may.
        """
        known = tuple(names)
        if not self.allows(known, right, run):
            message = (
                f"{' / '.join(known) or 'a caller without a name'} may not {right} "
                f"{f'run {run!r}' if run is not None else 'anything'} here; "
                "rose tenant grant (--tenants) or --access says who may"
            )
            raise Forbidden(message)

    def _of(self, names: Iterable[str]) -> Iterator[AccessRights]:
        """What any of the names may do."""
        for name in names:
            if name == INSTALLATION:
                yield _READER
            for pattern, rights in self._rules.items():
                if fnmatch.fnmatchcase(name, pattern):
                    yield rights
            for _, tenant in self._tenants.named(name) if self._tenants else ():
                yield AccessRights(tenant.publish, tenant.read, tenant.record)


class Identification:
    """Names a caller from its ``Authorization`` header and from the names in its certificate.

    Service accounts prove themselves by a token that their own API server signed for the audience
    ``rose-weights``. The keys of that API server are a file (``kubectl get --raw
    /openid/v1/jwks``), so no store needs a route to it.

    Args:
        tenants: of ``--tenants``; None knows no credentials.
        token: the installation's; empty knows no such caller.
        keys: files with JSON Web Key Sets of clusters whose service accounts are believed.
        anonymous: callers without any proof are let in too, as nobody.

    Raises:
        ValueError: a file holds no keys.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        tenants: Tenants | None = None,
        token: str = "",
        keys: Sequence[Path] = (),
        *,
        anonymous: bool = False,
    ) -> None:
        self._tenants, self._token, self._anonymous = tenants, token, anonymous
        self._accounts = ServiceAccounts(path.read_bytes() for path in keys)

    def __call__(self, header: str, certificate: tuple[str, ...]) -> tuple[str, ...] | None:
        """Names of a caller; None refuses it.

        Args:
            header: its ``Authorization``, empty without one.
            certificate: names in its certificate, which the server has verified.
        """
        shown = tuple(name for name in certificate if not name.startswith(_OURS))
        if not header:
            return shown if shown or self._anonymous else None
        if self._token and is_bearer(header, self._token):
            return (INSTALLATION, *shown)
        credential = header.partition(" ")[2].strip()
        tenant = self._tenants.tenant_of(credential) if self._tenants is not None else ""
        if tenant:
            return (f"tenant:{tenant}", *shown)
        account = self._accounts.account_of(credential, AUDIENCE)
        return (f"serviceaccount:{account.name}", *shown) if account else None
