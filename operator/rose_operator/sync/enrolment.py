"""``Enrol``: certificates for nodes, so that an agent that was taken over speaks for its own alone.

| step | who says so |
|---|---|
| the token is good, and for us | the API server (TokenReview with our audience) |
| it is the agents' service account | its user name |
| the pod it is bound to runs on node N | the token itself; the kubelet asked for it |
| the message asks for N | compared, else refused |

Then the authority signs the request for ``system:node:N``. Every replica can: nothing is kept.
Next step: ``authorization`` reads the name when the agent calls.
"""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from pathlib import Path

from rose_core.wire.enrolment import AUDIENCE, EnrolReply, EnrolRequest
from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import Api
from rose_operator.metrics import ENROLMENTS
from rose_wire import certificates, tls
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import Server
from rose_wire.services import ENROL

_log = logging.getLogger(__name__)
_NODE = "authentication.kubernetes.io/node-name"


@dataclass(frozen=True)
class Authority:
    """What signs; read anew for each certificate, so a renewed Secret needs no restart.

    Attributes:
        folder: has ``tls.crt`` and ``tls.key``.
        life: of the certificates.
    """

    folder: Path
    life: dt.timedelta

    def sign(self, request: bytes, node: str) -> bytes:
        """A certificate for the node.

        Raises:
            OSError: the authority cannot be read.
            ValueError: the request is malformed.
        """
        return certificates.sign(request, f"system:node:{node}", self._pair(), self.life)

    def _pair(self) -> tuple[bytes, bytes]:
        return (self.folder / tls.KEY).read_bytes(), (self.folder / tls.CERTIFICATE).read_bytes()


class Enrolment:
    """Answers agents that have no certificate yet, or one that ends soon.

    Args:
        api: asked whose token it is.
        authority: signs.
        account: user name of the agents' service account.
    """

    def __init__(self, api: Api, authority: Authority, account: str) -> None:
        self._api = api
        self._authority = authority
        self._account = account

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.unary(ENROL, self.enrol)

    async def enrol(self, request: EnrolRequest) -> EnrolReply:
        """Sign, or say why not.

        Raises:
            Refused: the token is not good for this node.
            Unavailable: the API server could not be asked.
        """
        try:
            status = await self._api.review_token(request.token, AUDIENCE)
            self._check(status, request.node)
            certificate = self._authority.sign(request.request, request.node)
        except ApiUnavailable as error:
            raise Unavailable(str(error)) from error
        except (ApiRefused, OSError, ValueError) as error:
            ENROLMENTS.labels("refused").inc()
            raise Refused(str(error)) from error
        except Refused as error:
            ENROLMENTS.labels("refused").inc()
            _log.warning("no certificate for node %s: %s", request.node, error)
            raise
        ENROLMENTS.labels("signed").inc()
        _log.info("certificate for node %s", request.node)
        return EnrolReply(certificate)

    def _check(self, status: dict[str, object], node: str) -> None:
        user = status.get("user")
        if not status.get("authenticated") or not isinstance(user, dict):
            raise Refused(f"the token is not good: {status.get('error', 'not authenticated')}")
        if AUDIENCE not in _words(status.get("audiences")):
            raise Refused(f"the token is not for {AUDIENCE}")
        if user.get("username") != self._account:
            raise Refused(f"{user.get('username')} is not the agents' account {self._account}")
        where = _words((user.get("extra") or {}).get(_NODE))
        if not where:
            message = (
                "the API server does not say which node the token's pod is on; Kubernetes 1.30 or "
                "later does. Else set the chart's value tls.nodes.enabled=false"
            )
            raise Refused(message)
        if where != [node]:
            raise Refused(f"the token's pod is on node {where[0]}, the request is for {node}")


def _words(found: object) -> list[str]:
    return [str(word) for word in found] if isinstance(found, list) else []
