"""Whose word about a node is taken.

The installation's bearer token says that a caller is an agent, not which. Where callers must have
certificates (``--tls-client-ca``), each speaks for the node that its certificate names, and for no
other: an agent that has been taken over can neither report for other nodes nor read their grants.
"""

from __future__ import annotations

from collections.abc import Collection

from rose_wire.certificates import names_node
from rose_wire.errors import Refused


def check(node: str, names: Collection[str], *, demanded: bool) -> None:
    """Whether a caller with these names in its certificate may speak for the node.

    Args:
        node: whom the message speaks for.
        names: of the caller's certificate, empty without one.
        demanded: certificates are asked for.

    Raises:
        Refused: it may not; says for whom it could.
    """
    if not demanded or names_node(node, names):
        return
    known = ", ".join(sorted(names)) or "nobody"
    message = f"the certificate names {known}, the message speaks for node {node}"
    raise Refused(message)
