"""Who a service account's token speaks for, told without asking its API server.

A cluster signs tokens of its service accounts for an *audience*: a pod mounts one (a projected
volume, renewed by the kubelet), a person makes one (``kubectl create token NAME --audience ...``).
The cluster's public keys (``kubectl get --raw /openid/v1/jwks``) are enough to check them, so who
checks needs neither a secret nor a way to that API server. A token for one audience opens nothing
that asks for another, so who is shown it cannot use it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import jwt
import msgspec

_ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")
_ACCOUNT = "system:serviceaccount:"


class ServiceAccounts:
    """Believes what these keys have signed.

    Args:
        key_sets: JSON Web Key Sets, one per cluster.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(self, key_sets: Iterable[bytes] = ()) -> None:
        self._keys = {key.key_id: key for one in key_sets for key in _keys_of(one)}

    def __len__(self) -> int:
        return len(self._keys)

    def account_of(self, token: str, audience: str) -> str:
        """``NAMESPACE/NAME`` of the account; empty if the token is none, or not for the audience.

        Args:
            token: as it was shown.
            audience: whom it must be for.
        """
        if not self._keys or not token:
            return ""
        try:
            key = self._keys[jwt.get_unverified_header(token).get("kid")]
            claims = jwt.decode(
                token,
                key.key,
                algorithms=_ALGORITHMS,
                audience=audience,
                options={"require": ["exp", "sub", "aud"]},
            )
        except (jwt.InvalidTokenError, KeyError):
            return ""
        subject = str(claims["sub"])
        namespace, _, name = subject.removeprefix(_ACCOUNT).partition(":")
        return f"{namespace}/{name}" if subject.startswith(_ACCOUNT) and name else ""


def _keys_of(raw: bytes) -> list[jwt.PyJWK]:
    try:
        return list(jwt.PyJWKSet.from_dict(msgspec.json.decode(raw)).keys)
    except (jwt.PyJWKSetError, jwt.PyJWKError, msgspec.MsgspecError, AttributeError) as error:
        raise ValueError(f"no JSON Web Key Set: {error}") from error
