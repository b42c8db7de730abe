"""The certificate with which a host's data routes answer routers.

The host makes the key itself and nobody signs it: routers get the certificate's SHA-256 by the
guard, over the stream that the operator's certificates protect, and take no other. So no key leaves
the host, and who answers in its place is not heard.

| age of the certificate | announced | shown |
|---|---|---|
| below ``renewed`` | it | it |
| then, for ``OVERLAP_SECONDS`` | it and the next one | it |
| then | the next one | the next one |

Connections that stand are not touched. Whoever asks what is announced moves this on, and the guard
asks all the time.
"""

from __future__ import annotations

import datetime as dt
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rose_wire import certificates

RENEWED_SECONDS = 86_400.0
# A router hears of a change within a second; one whose stream broke meanwhile takes longer.
OVERLAP_SECONDS = 60.0
_LIFE = dt.timedelta(days=30)  # routers go by the digest that they got, and not by this


@dataclass(frozen=True)
class _Pair:
    key: bytes
    certificate: bytes

    @classmethod
    def make(cls) -> _Pair:
        now = dt.datetime.now(dt.UTC)
        return cls(*certificates.make_own("rose-engine-host", _LIFE, now))

    @property
    def fingerprint(self) -> str:
        return certificates.fingerprint(self.certificate)


class DataCertificate:
    """Keeps one, and its successor in time.

    Args:
        clock: monotonic seconds.
        renewed: seconds that one is shown before its successor is announced.

    Attributes:
        context: of the listener; what it shows changes under it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, renewed: float = RENEWED_SECONDS
    ) -> None:
        self._clock, self._renewed = clock, renewed
        self._now = _Pair.make()
        self._next: _Pair | None = None
        self._since = clock()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._show(self._now)

    def announced(self) -> tuple[str, ...]:
        """SHA-256 of each certificate that a router may meet, in hex."""
        age = self._clock() - self._since
        if self._next is None and age >= self._renewed:
            self._next, self._since = _Pair.make(), self._clock()
        elif self._next is not None and age >= OVERLAP_SECONDS:
            self._now, self._next = self._next, None
            self._since = self._clock()
            self._show(self._now)
        pairs = (self._now,) if self._next is None else (self._now, self._next)
        return tuple(pair.fingerprint for pair in pairs)

    def _show(self, pair: _Pair) -> None:
        with tempfile.TemporaryDirectory() as folder:  # OpenSSL reads chains from files alone
            file = Path(folder) / "pair.pem"
            file.touch(mode=0o600)
            file.write_bytes(pair.key + pair.certificate)
            self.context.load_cert_chain(file)
