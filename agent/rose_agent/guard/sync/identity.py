"""This node's certificate: asked of the operator, kept in the run directory, renewed in time.

| state | next |
|---|---|
| none, or past half of its life | ask with a new key; on failure again, later and later |
| younger | sleep until half of its life is over |

Guard and weight-sync dial with what lies in the folder (``ROSE_TLS_IDENTITY``). While none is there
the guard protects serving as ever; it only cannot hear of grants. A certificate that was kept from
before a restart is used until the operator answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import grpc

from rose_agent.guard import metrics
from rose_core.wire.enrolment import EnrolRequest
from rose_wire import certificates, rpc, tls
from rose_wire.errors import WireError
from rose_wire.services import ENROL

_log = logging.getLogger(__name__)
_CALL_SECONDS = 10.0
_RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)


class Identity:
    """Keeps the certificate of one node.

    Args:
        node: whom it names.
        address: of the operator's ``Enrol``, ``tls://host:port``.
        token_file: the pod's own token; the kubelet renews it.
        folder: receives ``tls.crt`` and ``tls.key``.
    """

    def __init__(self, node: str, address: str, token_file: Path, folder: Path) -> None:
        self._node = node
        self._address = address
        self._token_file = token_file
        self._folder = folder
        self._enrolled = asyncio.Event()

    async def wait(self) -> None:
        """Wait until there is a certificate to dial with."""
        await self._enrolled.wait()

    async def run(self) -> None:
        """Ask at once, then in time, until cancelled."""
        if self._remaining() > 0:
            self._enrolled.set()
        attempt = 0
        while True:
            try:
                await self._enrol()
            except (WireError, OSError, ValueError) as error:
                metrics.ENROLMENTS.labels("failed").inc()
                pause = _RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)]
                attempt += 1
                _log.warning("no certificate from %s: %s", self._address, error)
            else:
                metrics.ENROLMENTS.labels("signed").inc()
                attempt = 0
                pause = self._remaining() / 2
                self._enrolled.set()
            await asyncio.sleep(max(1.0, pause))

    async def _enrol(self) -> None:
        token = self._token_file.read_text().strip()
        key, asked = certificates.request(f"system:node:{self._node}")
        channel = rpc.connect(self._address, credentials=_anonymous())
        try:
            request = EnrolRequest(self._node, token, asked)
            reply = await rpc.call(channel, ENROL, request, timeout=_CALL_SECONDS)
        finally:
            await channel.close()
        certificates.window(reply.certificate)
        files = {tls.KEY: key, tls.CERTIFICATE: reply.certificate, tls.BUNDLE: reply.authority}
        certificates.keep(self._folder, files)

    def _remaining(self) -> float:
        """Seconds that the certificate in the folder is good for; 0 without one."""
        try:
            _, until = certificates.window((self._folder / tls.CERTIFICATE).read_bytes())
        except (OSError, ValueError):
            return 0.0
        return max(0.0, until - time.time())


def _anonymous() -> grpc.ChannelCredentials:
    """Believe who the installation believes, and show no certificate of our own."""
    return tls.client_credentials(tls.trusted())
