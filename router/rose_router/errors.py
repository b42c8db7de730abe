"""Exceptions of the router; each is one HTTP answer.

RouterError                 status, reason (closed word), retry_after
├── BadRequest      400     wrong in itself, names the field; an id twice, a version that is gone
├── NotAllowed      401     bearer token missing or wrong
├── Forbidden       403     the token is for turns only
├── NotFound        404     no such session or response is kept here
├── Conflict        409     pinned version not announced yet; Retry-After: it may be
├── TooLarge        413     would not fit into the router's memory
├── Unprocessable   422     not spliceable, ended engines: asking again does not help
├── SlowCaller      408     the head or the body did not come in time
├── Busy            429     the queue is full; Retry-After says when to try again
├── Unforeseen      500     a mistake of the router's own; its log has the traceback
├── NotHere         501     asks for what only a single engine could do
├── Overloaded      503     waited too long, draining, no quorum; Retry-After says when
└── TurnLost        503     every try to finish the turn failed before it had a token
LegLost                     a leg ended without its last event; the turn goes on elsewhere
EngineRefused               the engine says the request itself is wrong; goes to the caller
Unreachable                 nobody takes connections at an engine's address
LoopEnded                   a loop that watches turns, demand or replicas; the router ends too
"""

REASON = "X-Rose-Reason"
"""Header with the closed reason of an error."""


class RouterError(Exception):
    """Base of what the router answers to callers.

    Args:
        reason: closed word; the same in the body and in metrics.
        message: what was wrong, where, what to do.
        retry_after: seconds after which trying again may help; 0 = it does not help.
    """

    status = 500

    def __init__(self, reason: str, message: str, *, retry_after: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class BadRequest(RouterError):
    """The request is wrong in itself."""

    status = 400


class NotAllowed(RouterError):
    """The bearer token is missing or wrong."""

    status = 401


class Forbidden(RouterError):
    """The caller is known, and may not do this."""

    status = 403


class NotFound(RouterError):
    """What is asked for is not kept here."""

    status = 404


class Conflict(RouterError):
    """The request cannot be met as things stand, and may be met soon: clients ask again."""

    status = 409


class TooLarge(RouterError):
    """It would not fit into the router's memory, whatever else there is."""

    status = 413


class Unprocessable(RouterError):
    """What is asked is understood and will not be done; clients ask after a 409 or 503 again."""

    status = 422


class SlowCaller(RouterError):
    """The body did not come in time."""

    status = 408


class Busy(RouterError):
    """More turns wait than may; ``retry_after`` says when there may be room."""

    status = 429


class Unforeseen(RouterError):
    """The router has made a mistake; asking again may meet another one, or none."""

    def __init__(self, message: str) -> None:
        super().__init__("Internal", message)


class NotHere(RouterError):
    """Asks for what only a single engine could do."""

    status = 501


class Overloaded(RouterError):
    """No room now; ``retry_after`` says when."""

    status = 503


def draining() -> Overloaded:
    """A turn that another router should have."""
    message = "this router is shutting down; its turns end, new ones go elsewhere"
    return Overloaded("Draining", message, retry_after=5)


class TurnLost(RouterError):
    """Every try to finish the turn failed before it had a token."""

    status = 503


class LegLost(Exception):
    """A leg ended without its last event.

    Args:
        refused: the engine answered and would not take the request now.
        doubtful: it failed at it in a way that may be the request's own; a canary tells.
        unsent: its process has never seen the request, or its host is out of reach: no suspicion.
    """

    def __init__(
        self, message: str, *, refused: bool = False, doubtful: bool = False, unsent: bool = False
    ) -> None:
        super().__init__(message)
        self.refused = refused
        self.doubtful = doubtful
        self.unsent = unsent


class EngineRefused(Exception):
    """The engine says the request itself is wrong; no other engine would think otherwise."""


class Unreachable(OSError):
    """Nobody takes connections at an engine's address, or its host is gone: no turn ended it."""


class LoopEnded(Exception):
    """A loop of the router that only its end may end."""
