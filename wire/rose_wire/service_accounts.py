"""Who a service account's token speaks for, told without asking its API server.

A cluster signs tokens of its service accounts for an *audience*: a pod mounts one (a projected
volume, renewed by the kubelet), a person makes one (``kubectl create token NAME --audience ...``).
The cluster's public keys (``kubectl get --raw /openid/v1/jwks``) are enough to check them, so who
checks needs neither a secret nor a way to that API server. A token for one audience opens nothing
that asks for another, so who is shown it cannot use it elsewhere.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jwt
import msgspec

from rose_core.unreadable import UNREADABLE

_ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")
_ACCOUNT = "system:serviceaccount:"
# Of what a caller showed, this much is told back.
_MOST_SHOWN = 200
# What anybody may send as a token: also numbers of any length, and lists as deep as a head is long.
_UNREADABLE = (jwt.InvalidTokenError, TypeError, ValueError, OverflowError, RecursionError)


class Account(NamedTuple):
    """Whom a token speaks for.

    Attributes:
        name: ``NAMESPACE/NAME``.
        expires: Unix seconds; from then on it speaks for nobody.
    """

    name: str
    expires: float


class ServiceAccounts:
    """Believes what these keys have signed.

    Args:
        key_sets: JSON Web Key Sets, one per cluster.
        now: Unix seconds; a token ends at its second.

    Attributes:
        generation: counts renewals; what was believed before one is to be asked again.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(
        self, key_sets: Iterable[bytes] = (), now: Callable[[], float] = time.time
    ) -> None:
        self.now = now
        self.generation = 0
        self.renew(key_sets)

    def renew(self, key_sets: Iterable[bytes]) -> None:
        """Believe these from now on, and no others.

        Raises:
            ValueError: one of them is no set of keys; then those before stay.
        """
        self._keys = {key.key_id: key for one in key_sets for key in _keys_of(one)}
        self.generation += 1

    def __len__(self) -> int:
        return len(self._keys)

    def account_of(self, token: str, audience: str) -> Account | None:
        """The account; ``None`` if the token is none now, or not for the audience.

        Args:
            token: as it was shown.
            audience: whom it must be for.
        """
        if not self._keys or not token:
            return None
        try:
            key = self._keys[jwt.get_unverified_header(token).get("kid")]
            claims = jwt.decode(
                token,
                key.key,
                algorithms=_ALGORITHMS,
                audience=audience,
                options={"require": ["exp", "sub", "aud"], "verify_exp": False},
            )
            expires = float(claims["exp"])
        except (KeyError, *_UNREADABLE):
            return None
        if expires <= self.now():
            return None
        subject = str(claims["sub"])
        namespace, _, name = subject.removeprefix(_ACCOUNT).partition(":")
        if not subject.startswith(_ACCOUNT) or not name:
            return None
        return Account(f"{namespace}/{name}", expires)

    def complaint(self, token: str, audience: str, namespace: str) -> str:
        """Why a token does not speak for an account of this namespace, for whoever showed it.

        Only what the token itself says is told back; whether it was signed is told last.
        """
        try:
            claims = jwt.decode(token, options={"verify_signature": False, "verify_exp": False})
            audiences = claims.get("aud") or ()
            subject, until = str(claims.get("sub", "")), float(claims.get("exp", 0))
        except _UNREADABLE:
            return "the bearer token is none that this cluster makes"
        if until <= self.now():
            return f"the bearer token expired at {_time(until)}"
        named = [audiences] if isinstance(audiences, str) else [str(one) for one in audiences]
        where = subject.removeprefix(_ACCOUNT).partition(":")[0]
        if audience not in named:
            shown = ", ".join(named)[:_MOST_SHOWN] or "nobody"
            return f"the bearer token is for the audience {shown}, not for {audience}"
        if not subject.startswith(_ACCOUNT) or where != namespace:
            shown = subject[:_MOST_SHOWN]
            return f"the bearer token is of {shown}, not of a service account in {namespace}"
        return "the bearer token is not signed with a key of this cluster"


def _time(unix: float) -> str:
    try:
        return f"{dt.datetime.fromtimestamp(unix, dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return "a time that is none"


def _keys_of(raw: bytes) -> list[jwt.PyJWK]:
    try:
        return list(jwt.PyJWKSet.from_dict(msgspec.json.decode(raw)).keys)
    except (jwt.PyJWKSetError, jwt.PyJWKError, *UNREADABLE, AttributeError) as error:
        raise ValueError(f"no JSON Web Key Set: {error}") from error
