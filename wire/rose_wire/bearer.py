"""Bearer tokens: does a caller's ``Authorization`` carry the word that both sides were given?"""

from __future__ import annotations

import hmac


def is_bearer(header: str, token: str) -> bool:
    """Whether an ``Authorization`` header carries this token; the time taken tells nothing."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="replace"), token.encode())
    return scheme.lower() == "bearer" and same
