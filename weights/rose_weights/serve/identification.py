"""Who a caller is: from its ``Authorization`` header and the names in its certificate.

``tenants`` says what counts as what. Service accounts prove themselves by a token that their own
API server signed for the audience ``rose-weights``; its keys are a file (``kubectl get --raw
/openid/v1/jwks``), so no store needs a way to that API server. Next step: ``access``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rose_weights.serve.tenants import INSTALLATION, Tenants
from rose_wire.bearer import is_bearer
from rose_wire.service_accounts import ServiceAccounts

AUDIENCE = "rose-weights"
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
