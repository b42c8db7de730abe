"""Pages of keys that lie in others' memory: under a name and a seal that only the lease can make.

A pool of several nodes' memory knows no users. Whoever reaches it lists names, reads and replaces
what lies there. So a page's name there is an HMAC (RFC 2104) of its own, and its content is
encrypted by AES-256 in Galois/Counter Mode (NIST SP 800-38D), bound to that name: what was made
without the lease's secret, changed, or put under another name, is not opened. Names say neither
which tokens nor which weights. Next step: ``pool_process`` moves what was sealed.
"""

from __future__ import annotations

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES, _TAG_BYTES = 12, 16

SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
"""By which a sealed page is longer."""


class Seal:
    """Names and seals of one lease.

    Args:
        secret: the lease's (``rose_core.rollouts.engines.kv_store.pool_secret``).

    Raises:
        ValueError: it is empty, so anybody could make it; or the library is too old.
    """

    def __init__(self, secret: str) -> None:
        if not secret:
            raise ValueError("pages cannot be sealed without a secret of their lease")
        if not hasattr(AESGCM, "encrypt_into"):
            raise ValueError("cryptography is too old: it has no AESGCM.encrypt_into; install 50")
        made = secret.encode()
        self._names = hmac.digest(made, b"names", "sha256")
        self._cipher = AESGCM(hmac.digest(made, b"pages", "sha256"))

    def name(self, page: str) -> str:
        """What a page is called where others see it."""
        return "rose-" + hmac.new(self._names, page.encode(), "sha256").hexdigest()

    def close(self, page: str, content: memoryview, into: memoryview) -> None:
        """Seal a page; ``into`` is ``SEAL_BYTES`` longer than it."""
        nonce = os.urandom(_NONCE_BYTES)
        into[:_NONCE_BYTES] = nonce
        self._cipher.encrypt_into(nonce, content, page.encode(), into[_NONCE_BYTES:])

    def open(self, page: str, sealed: memoryview, into: memoryview) -> bool:
        """Open a page; False = this lease never sealed that under this name, ``into`` is junk."""
        nonce, rest = bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:]
        try:
            self._cipher.decrypt_into(nonce, rest, page.encode(), into)
        except InvalidTag:
            return False
        return True
