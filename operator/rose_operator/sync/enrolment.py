"""Who agents and routers are: certificates, and for routers the token of their lease.

``Enrol``, so that an agent that was taken over speaks for its own node alone:

| step | who says so |
|---|---|
| the token is good, and for us | the API server (TokenReview with our audience) |
| it is the agents' service account | its user name |
| the pod it is bound to runs on node N | the token itself; the kubelet asked for it |
| the message asks for N | compared, else refused |

Then the authority signs the request for ``system:node:N``.

``EnrolRouter``, so that a router that was taken over is the router of its lease alone:

| step | who says so |
|---|---|
| the token is good, for the audience that names lease L | the API server |
| it is the routers' service account | its user name; its pods get the audience that we wrote |
| the message asks for L, which has a router | compared with the leases, else refused |

Then another authority signs for the Services of that router. The token that agents, operator and
replicas show to it is made of the installation's and the lease's name, so no router ever sees the
installation's. Every replica of the operator can do both: nothing is kept.

Next step: ``service.check_node`` reads a node's name when its agent calls.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rose_core.api import RolloutLease
from rose_core.rotation import SPREAD_SECONDS
from rose_core.wire.enrolment import (
    AUDIENCE,
    EnrolReply,
    EnrolRequest,
    EnrolRouterRequest,
    RouterCaller,
    RouterIdentity,
    router_audience,
)
from rose_operator.apply.routers import hosts_of
from rose_operator.errors import ApiRefused, ApiUnavailable
from rose_operator.kube.api import Api
from rose_operator.metrics import ENROLMENTS
from rose_wire import certificates, tls
from rose_wire.bearer import BATCHES, INGEST, lease_token, service_token
from rose_wire.errors import Refused, Unavailable
from rose_wire.rpc import Server
from rose_wire.services import ENROL, ENROL_ROUTER

_log = logging.getLogger(__name__)
# How often what a router was sent is compared with what holds now.
_LOOK_SECONDS = 1.0
# Without certificates nothing expires; a router is looked at again all the same.
_WITHOUT_TLS_SECONDS = 43_200.0
_NODE = "authentication.kubernetes.io/node-name"


@contextmanager
def _counted(what: str) -> Iterator[None]:
    """Counts and logs how an enrolment ended.

    Raises:
        Refused: for whatever is at fault in the request, its token or the authority's folder.
        Unavailable: the API server could not be asked; not counted, the caller asks again.
    """
    try:
        yield
    except ApiUnavailable as error:
        raise Unavailable(str(error)) from error
    except (ApiRefused, OSError, ValueError, Refused) as error:
        ENROLMENTS.labels("refused").inc()
        _log.warning("no %s: %s", what, error)
        raise Refused(str(error)) from error
    ENROLMENTS.labels("signed").inc()
    _log.info("%s", what)


@dataclass(frozen=True)
class NodeAuthority:
    """What signs; read anew for each certificate, so a renewed Secret needs no restart.

    Attributes:
        folder: has ``tls.crt`` and ``tls.key``.
        life: of the certificates.
    """

    folder: Path
    life: dt.timedelta

    def sign(self, request: bytes, name: str, hosts: Sequence[str] = ()) -> bytes:
        """A certificate under this name, for a listener of these hosts where there are some.

        Raises:
            OSError: the authority cannot be read.
            ValueError: the request is malformed.
        """
        return certificates.sign(request, name, self._pair(), self.life, hosts)

    def certificate(self) -> bytes:
        """What believes in it believes: its own, and its successor's where there is one, PEM.

        Raises:
            OSError: it cannot be read.
        """
        return tls.bundle_of(self.folder)

    def _pair(self) -> tuple[bytes, bytes]:
        return (self.folder / tls.KEY).read_bytes(), (self.folder / tls.CERTIFICATE).read_bytes()


class NodeEnrolment:
    """Answers agents that have no certificate yet, or one that ends soon.

    Args:
        api: asked whose token it is.
        authority: signs.
        account: user name of the agents' service account.
    """

    def __init__(self, api: Api, authority: NodeAuthority, account: str) -> None:
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
        with _counted(f"certificate for node {request.node}"):
            status = await self._api.review_token(request.token, AUDIENCE)
            self._check(status, request.node)
            name = f"system:node:{request.node}"
            # The node's own name as a host: its guard listens to the guards of other nodes.
            certificate = self._authority.sign(request.request, name, [request.node])
            authority = self._authority.certificate()
        return EnrolReply(certificate, authority)

    def _check(self, status: dict[str, object], node: str) -> None:
        user = _user(status, AUDIENCE, self._account, "agents")
        where = _strings((user.get("extra") or {}).get(_NODE))
        if not where:
            message = (
                "the API server does not say which node the token's pod is on; Kubernetes 1.30 or "
                "later does. Else set the chart's value tls.nodes.enabled=false"
            )
            raise Refused(message)
        if where != [node]:
            raise Refused(f"the token's pod is on node {where[0]}, the request is for {node}")


@dataclass(frozen=True)
class RouterTrust:
    """What the operator gives to routers, as far as it is the same for all.

    Attributes:
        token: the installation's; a lease's is made of it.
        namespace: where routers are.
        account: user name of their service account.
        authority: signs their certificates; None without TLS.
        agents: file with the authority of agents' certificates; None where they have none.
        operator: file with the authority of the operator's own certificate.
    """

    token: str
    namespace: str
    account: str
    authority: NodeAuthority | None = None
    agents: Path | None = None
    operator: Path | None = None


class RouterEnrolment:
    """Answers routers.

    Args:
        api: asked whose token it is.
        trust: what they are given.
        lease: a lease by its key; None where there is none.
        keys: the keys of callers' service accounts, as they are now.
    """

    def __init__(
        self,
        api: Api,
        trust: RouterTrust,
        lease: Callable[[str], RolloutLease | None],
        keys: Callable[[], str],
    ) -> None:
        self._api, self._trust, self._lease, self._keys = api, trust, lease, keys

    def serve_on(self, server: Server) -> None:
        """Bind the method."""
        server.server_stream(ENROL_ROUTER, self.enrol)

    async def enrol(self, request: EnrolRouterRequest) -> AsyncGenerator[RouterIdentity, None]:
        """Say who the router is, and again whenever something of it has changed.

        The stream ends when half of the certificate's life is over, or of the time in which a new
        authority is made known: the router asks anew.

        Raises:
            Refused: the token is not that of this lease's router, or there is no such lease.
            Unavailable: the API server could not be asked.
        """
        with _counted(f"identity for the router of lease {request.lease}"):
            status = await self._api.review_token(request.token, router_audience(request.lease))
            _user(status, router_audience(request.lease), self._trust.account, "routers")
            identity = self._identity(request)
        yield identity
        began, life = asyncio.get_running_loop().time(), self._life()
        while asyncio.get_running_loop().time() - began < life:
            await asyncio.sleep(_LOOK_SECONDS)
            lease = self._lease(request.lease)
            # A lease that is gone, or cannot be read for now, changes nothing: its router goes too.
            callers = identity.callers if lease is None else callers_of(lease)
            now = msgspec.structs.replace(identity, account_keys=self._keys(), callers=callers)
            if now != identity:
                identity = now
                yield identity

    def _life(self) -> float:
        authority = self._trust.authority
        if authority is None:
            return _WITHOUT_TLS_SECONDS
        return min(authority.life.total_seconds(), SPREAD_SECONDS) / 2

    def _identity(self, request: EnrolRouterRequest) -> RouterIdentity:
        lease, trust = self._lease(request.lease), self._trust
        if lease is None:
            raise Refused(f"there is no lease {request.lease}")
        token, keys = lease_token(trust.token, request.lease), self._keys()
        callers = callers_of(lease)
        batches, ingest = (
            service_token(trust.token, request.lease, one) for one in (BATCHES, INGEST)
        )
        if trust.authority is None or not request.request:
            return RouterIdentity(
                token, account_keys=keys, callers=callers, batches=batches, ingest=ingest
            )
        # An engine of the team's own, elsewhere, has no certificate of a node.
        agents = None if lease.spec.dedicated_engines else trust.agents
        return RouterIdentity(
            token,
            trust.authority.sign(request.request, "rose-router", hosts_of(lease, trust.namespace)),
            trust.authority.certificate(),
            agents.read_bytes() if agents else b"",
            trust.operator.read_bytes() if trust.operator else b"",
            keys,
            callers,
            batches,
            ingest,
        )


def callers_of(lease: RolloutLease) -> tuple[RouterCaller, ...]:
    """The lease's list; one whose time cannot be read is left out, for it would never end."""
    found = []
    for one in lease.spec.router.callers:
        try:
            until = dt.datetime.fromisoformat(one.expires).timestamp() if one.expires else None
        except ValueError:
            _log.warning("lease %s: caller %s: %r is no time", lease.metadata.key, one.name, one)
            continue
        found.append(RouterCaller(one.name, one.sha256, one.turns_only, until))
    return tuple(found)


def _user(status: dict[str, object], audience: str, account: str, whose: str) -> dict[str, Any]:
    """The user of a reviewed token.

    Raises:
        Refused: the token is not valid, for another audience, or of another account.
    """
    user = status.get("user")
    if not status.get("authenticated") or not isinstance(user, dict):
        raise Refused(f"the token is not good: {status.get('error', 'not authenticated')}")
    if audience not in _strings(status.get("audiences")):
        raise Refused(f"the token is not for {audience}")
    if user.get("username") != account:
        raise Refused(f"{user.get('username')} is not the {whose}' account {account}")
    return user


def _strings(found: object) -> list[str]:
    return [str(item) for item in found] if isinstance(found, list) else []
