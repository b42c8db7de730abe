"""Agent -> operator ``Enrol``: a node's agent proves which node it is on, and gets a certificate.

The proof is a token that the kubelet made for the agent's own pod; the API server says which node
that pod is on. What the request itself calls the node is compared with that, never believed.
"""

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
    """The certificate, PEM."""

    certificate: bytes


AUDIENCE = "rose-operator"
