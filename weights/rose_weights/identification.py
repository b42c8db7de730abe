"""Who a caller is: from its ``Authorization`` header and the names in its certificate.

``tenants`` says what counts as what. Service accounts prove themselves by a token that their own
API server signed for the audience ``rose-weights``; its keys are a file (``kubectl get --raw
/openid/v1/jwks``), so no store needs a way to that API server. Next step: ``access``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jwt
import msgspec

from rose_weights.tenants import INSTALLATION, Tenants
from rose_wire.bearer import is_bearer

AUDIENCE = "rose-weights"
_ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")
_ACCOUNT = "system:serviceaccount:"
# Names that only this module gives; a certificate that bears one proves nothing by it.
_OURS = ("tenant:", "serviceaccount:", INSTALLATION)


class Identification:
    """Says who callers are.

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
        self._keys = {key.key_id: key for path in keys for key in _keys_of(path)}

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
        account = self._account_of(credential)
        return (f"serviceaccount:{account}", *shown) if account else None

    def _account_of(self, token: str) -> str:
        """``NAMESPACE/NAME`` of a service account's token; empty if it is none, or not for us."""
        if not self._keys:
            return ""
        try:
            key = self._keys[jwt.get_unverified_header(token).get("kid")]
            claims = jwt.decode(
                token,
                key.key,
                algorithms=_ALGORITHMS,
                audience=AUDIENCE,
                options={"require": ["exp", "sub", "aud"]},
            )
        except (jwt.InvalidTokenError, KeyError):
            return ""
        subject = str(claims["sub"])
        namespace, _, name = subject.removeprefix(_ACCOUNT).partition(":")
        return f"{namespace}/{name}" if subject.startswith(_ACCOUNT) and name else ""


def _keys_of(path: Path) -> list[jwt.PyJWK]:
    try:
        return jwt.PyJWKSet.from_dict(msgspec.json.decode(path.read_bytes())).keys
    except (jwt.PyJWKSetError, jwt.PyJWKError, msgspec.MsgspecError, AttributeError) as error:
        raise ValueError(f"{path} is no JSON Web Key Set: {error}") from error
