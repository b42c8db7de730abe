"""How processes get who they are from the operator: agents of nodes, routers of leases.

``Enrol``: a node's agent proves which node it is on, and gets a certificate. The proof is a token
that the kubelet made for the agent's own pod; the API server says which node that pod is on. What
the request itself calls the node is compared with that, never believed.

``EnrolRouter``: a router proves which lease it serves, and gets what it needs for that lease alone.
The proof is a token for an audience that names the lease; the kubelet makes it because the operator
wrote that audience into the pod, and the pod can get no other. The stream stays open and brings
what changes.
"""

import hashlib

import msgspec


class EnrolRequest(msgspec.Struct, frozen=True):
    """What an agent asks for.

    Attributes:
        node: whom the certificate shall name.
        token: of the agent's service account, bound to its pod, for the audience ``AUDIENCE``.
        request: certificate signing request, PEM; the key never leaves the node.
    """

    node: str
    token: str
    request: bytes

    def __repr__(self) -> str:
        """Without the token: requests end up in logs."""
        return f"EnrolRequest(node={self.node!r})"


class EnrolReply(msgspec.Struct, frozen=True):
    """The certificate, and the authority by which guards know those of other nodes; PEM."""

    certificate: bytes
    authority: bytes = b""


class EnrolRouterRequest(msgspec.Struct, frozen=True):
    """What a router asks for.

    Attributes:
        lease: ``namespace/name``.
        token: of the routers' service account, for the audience ``router_audience(lease)``.
        request: certificate signing request, PEM; the key never leaves the pod. Empty: no TLS.
    """

    lease: str
    token: str
    request: bytes = b""

    def __repr__(self) -> str:
        """Without the token: requests end up in logs."""
        return f"EnrolRouterRequest(lease={self.lease!r})"


class RouterCaller(msgspec.Struct, frozen=True, omit_defaults=True):
    """Somebody that a lease names as a caller of its router.

    Attributes:
        sha256: of the credential, hexadecimal.
        turns_only: it opens turns, and no route that concerns those of others.
        expires: Unix seconds; None = while it is listed.
    """

    name: str
    sha256: str
    turns_only: bool = False
    expires: float | None = None


class RouterIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the router of one lease is given; nothing in it is good for another lease.

    Attributes:
        token: what engines' owners, the operator and this lease's other replicas show to it.
        certificate: for the key of the request, good for the Services of this router; empty
            without TLS.
        routers: authority of routers' certificates, PEM.
        agents: authority of the agents' certificates, which owners of engines must then show;
            empty where some have none.
        operator: authority of the operator's certificate, PEM.
        account_keys: JSON Web Key Set, by which callers' service accounts are known.
        callers: of the lease's own list.
        batches, ingest: what this router shows to its lease's ``rose batches`` and ``rose ingest``.
    """

    token: str
    certificate: bytes = b""
    routers: bytes = b""
    agents: bytes = b""
    operator: bytes = b""
    account_keys: str = ""
    callers: tuple[RouterCaller, ...] = ()
    batches: str = ""
    ingest: str = ""

    def __repr__(self) -> str:
        """Without the tokens."""
        return "RouterIdentity(...)"


def router_audience(lease: str) -> str:
    """Whom the token of a lease's router is for."""
    return f"rose-router/{lease}"


def lease_digest(namespace: str, name: str) -> str:
    """What tells leases apart whose joined names are one: ``a-b``/``c`` and ``a``/``b-c``.

    The chart makes the same eight digits (``rose.leaseDigest`` in its helpers).
    """
    return hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:8]


def named_for(text: str, namespace: str, name: str) -> str:
    """A text for all leases with one lease's names in it; other braces stay as they are.

    Args:
        text: may hold ``{namespace}``, ``{lease}`` and ``{digest}``.
        namespace: the lease's.
        name: the lease's.
    """
    values = {"namespace": namespace, "lease": name, "digest": lease_digest(namespace, name)}
    for key, meant in values.items():
        text = text.replace(f"{{{key}}}", meant)
    return text


AUDIENCE = "rose-operator"
