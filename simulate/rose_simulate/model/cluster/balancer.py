"""Serving's balancer: fewest requests under way, over the replicas that are on.

A session goes on where its keys are, as behind a gateway that knows of prefix caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rose_simulate.model.cluster.lent import LentReplica
from rose_simulate.model.gpus.gates import ServingRequest


class Balancer:
    """Gives requests to replicas; what finds none waits.

    Args:
        serving: which replicas of a service take requests, whether on or off.
        any_off: whether some node is off.
    """

    def __init__(
        self, serving: Callable[[str], Sequence[LentReplica]], any_off: Callable[[], bool]
    ) -> None:
        self._serving, self._any_off = serving, any_off
        self._turn = 0
        self._homes: dict[str, LentReplica] = {}
        self._stranded: list[tuple[ServingRequest, str]] = []

    def take(self, request: ServingRequest, service: str) -> None:
        """A request has come."""
        self._turn += 1
        among = self._serving(service)
        if self._any_off():
            among = [one for one in among if one.machine.up]
        if not among:
            self._stranded.append((request, service))
            return
        home = self._homes.get(request.session)
        if home is None or home not in among:
            turn, size = self._turn, len(among)
            best = min(range(size), key=lambda n: (among[n].serving.live, (n - turn) % size))
            home = among[best]
        if request.session:
            self._homes[request.session] = home
        home.serve(request)

    def retry(self, request: ServingRequest, service: str) -> None:
        """Begin a request anew whose replica is gone; its client has waited since it first came."""
        request.first_ns, request.sequence = 0, None
        self.take(request, service)

    def retry_stranded(self) -> None:
        """Take what found no replica, now that there are some."""
        waiting, self._stranded = self._stranded, []
        for request, service in waiting:
            self.take(request, service)
