"""What the cluster around the pools says: zones and cordons of nodes, autoscalers of serving.

All of it is optional. Where the operator may not read nodes or autoscalers, zones are unknown (one
zone for all limits), cordons are not seen and autoscalers not checked; the log says so once, and
the metric ``rose_operator_readable`` does all the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from rose_core.lending.autoscalers import Autoscaler, conflicting
from rose_operator.errors import ApiRefused, OperatorError
from rose_operator.kube.api import Api, ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import READABLE

_log = logging.getLogger(__name__)
ZONE = "topology.kubernetes.io/zone"
_SCALERS = (ObjectKind.AUTOSCALER, ObjectKind.SCALED_OBJECT)
_AGAIN_SECONDS = 5.0
# Zones never change and autoscalers seldom do; new nodes are asked for by their agents' dialling.
_LIST_SECONDS = 300.0
_NO_RIGHT = frozenset({401, 403})


class ClusterFacts:
    """The last word about nodes and autoscalers.

    Args:
        changed: called when a cordon or an autoscaler came or went.

    Attributes:
        zones: node -> zone, for nodes that have one.
        cordoned: unschedulable nodes.
        autoscalers: those that follow figures of whole GPUs.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.zones: dict[str, str] = {}
        self.cordoned: frozenset[str] = frozenset()
        self.autoscalers: tuple[Autoscaler, ...] = ()
        self._changed = changed
        self._unreadable: set[ObjectKind] = set()

    async def keep_listing(self, api: Api) -> None:
        """Read zones and autoscalers now and then, for ever."""
        while True:
            await self.refresh(api)
            await asyncio.sleep(_LIST_SECONDS)

    async def refresh(self, api: Api) -> None:
        """Read zones and autoscalers once; what cannot be read stays as it was."""
        nodes = await self._read(api, ObjectKind.NODE)
        if nodes is not None:
            self.zones = zones(nodes)
        found = [raw for kind in _SCALERS for raw in await self._read(api, kind) or ()]
        scalers = conflicting(found)
        if scalers != self.autoscalers:
            self.autoscalers = scalers
            self._changed()

    async def _read(self, api: Api, kind: ObjectKind) -> list[Raw] | None:
        try:
            items, _ = await api.list(kind)
        except ApiRefused as error:
            if kind not in self._unreadable:
                _log.warning("%s cannot be read and is not taken into account: %s", kind, error)
            self._unreadable.add(kind)
            READABLE.labels(kind.value).set(0)
            return None
        except OperatorError as error:
            _log.info("listing of %s: %s", kind.value, error)
            return None
        self._unreadable.discard(kind)
        READABLE.labels(kind.value).set(1)
        return items

    async def watch_cordons(self, api: Api) -> None:
        """Follow the unschedulable nodes, for ever: the field selector leaves out all others."""
        while True:
            try:
                items, version = await api.list(ObjectKind.CORDONED)
                self._cordons({raw["metadata"]["name"] for raw in items})
                async for change, raw in api.watch(ObjectKind.CORDONED, version):
                    name = {raw["metadata"]["name"]}
                    gone = change == "DELETED"
                    self._cordons(self.cordoned - name if gone else self.cordoned | name)
            except OperatorError as error:
                _log.info("watch of cordoned nodes: %s", error)
                if isinstance(error, ApiRefused) and error.code in _NO_RIGHT:
                    await asyncio.sleep(_LIST_SECONDS)
            # Told 410, for instance: a watch that has heard nothing for minutes asks for changes
            # since a version that is not kept any more. A new listing repairs that.
            await asyncio.sleep(_AGAIN_SECONDS)

    def _cordons(self, nodes: Iterable[str]) -> None:
        found = frozenset(nodes)
        if found != self.cordoned:
            self.cordoned = found
            self._changed()


def zones(nodes: Iterable[Raw]) -> dict[str, str]:
    """Node -> zone."""
    labels = {raw["metadata"]["name"]: raw["metadata"].get("labels") or {} for raw in nodes}
    return {name: found[ZONE] for name, found in labels.items() if found.get(ZONE)}
