"""Whether a conversation with a server in a sandbox can go on over another connection.

Both ends count its messages. One end is in the sandbox, and is saved and given back with it; the
other is its caller's, who remembers what has been said. After a loss they compare:

| the sandbox | then |
|---|---|
| has made all that the caller was given, and taken what it can no longer say again | goes on |
| has made less | lost: the caller was told of a world that is gone |
| does not remember what the caller no longer has | lost |

Messages that the caller sent and the sandbox does not have are said again: their answers were never
given, so nobody can tell.
"""

from __future__ import annotations

from dataclasses import dataclass


class ConversationLost(Exception):
    """It cannot go on; the text says which side remembers what the other one does not."""


@dataclass(frozen=True)
class Inside:
    """What the sandbox's end remembers.

    Attributes:
        took: messages of the caller, from the first.
        made: messages of the server, from the first.
    """

    took: int
    made: int


@dataclass(frozen=True)
class Outside:
    """What the caller's end remembers.

    Attributes:
        sent: messages of the caller, from the first.
        kept: how many of the last ones can be said again.
        given: messages of the server that the caller was given.
    """

    sent: int
    kept: int
    given: int


def count_resent(outside: Outside, inside: Inside) -> int:
    """How many of the caller's last messages are said again.

    Raises:
        ConversationLost: it cannot go on.
    """
    if inside.made < outside.given:
        raise ConversationLost(
            f"the sandbox was given back as it was {outside.given - inside.made} answers ago; its "
            "caller has acted on them"
        )
    if inside.took > outside.sent:
        raise ConversationLost(
            f"the sandbox has {inside.took} messages of a caller who sent {outside.sent}"
        )
    lacking = outside.sent - inside.took
    if lacking > outside.kept:
        raise ConversationLost(
            f"the sandbox lacks {lacking} messages, of which {outside.kept} can be said again"
        )
    return lacking
