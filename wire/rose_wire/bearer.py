"""Bearer tokens: does a caller carry the token that both sides were given, and those of a lease."""

from __future__ import annotations

import hmac


def is_bearer(header: str, token: str) -> bool:
    """Whether an ``Authorization`` header carries this token; the time taken tells nothing."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return scheme.lower() == "bearer" and same


def lease_token(installation: str, lease: str) -> str:
    """What is shown to the router of a lease: good there alone, and says nothing of the other.

    An HMAC (RFC 2104) of the lease's name under the installation's token: every replica of the
    operator makes the same one, and nobody has to keep it.

    Args:
        installation: the installation's token.
        lease: ``namespace/name``.
    """
    return hmac.new(installation.encode(), f"rose-router/{lease}".encode(), "sha256").hexdigest()


BATCHES, INGEST = "batches", "ingest"
"""Of ``service_token``: what serves one lease's router and hears it alone, ``rose batches
--token-file`` and ``rose ingest --caller-token-file``."""


def service_token(installation: str, lease: str, service: str) -> str:
    """What a lease's router shows to a service beside it, and to nobody else.

    Made as ``lease_token`` is, and not from it: those who speak to the router hold that one. So no
    router holds a word that is heard in the place of another lease's, and nobody has to bring it
    one.

    Args:
        installation: the installation's token.
        lease: ``namespace/name``.
        service: its name.
    """
    return hmac.new(installation.encode(), f"rose-{service}/{lease}".encode(), "sha256").hexdigest()
