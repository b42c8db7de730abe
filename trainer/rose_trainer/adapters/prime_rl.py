"""prime-rl's orchestrator says which rollouts have ended, and what became of them.

    python -m rose_trainer.adapters.prime_rl @ orchestrator.toml   # in place of `orchestrator`

Its turns carry a session by themselves (``X-Session-ID``, the id of the trace); groups are inferred
from equal prompts. Four methods of its sinks are put inside ours:

| prime-rl's | says of traces |
|---|---|
| ``TrainSink.process_episode`` | they are over |
| ``TrainSink.process_group`` | dropped, where they come into no batch: no survivor, not admitted |
| ``TrainSink._maybe_batch`` | trained on; dropped, where they are too old or wholly pruned |
| ``EvalSink.process_group`` | withdrawn |

``ROSE_ROUTER_URL`` and ``ROSE_TURN_TOKEN`` are the lease's. Only ``install`` imports ``prime_rl``.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from rose_trainer.adapters.report import UNREADABLE, finish_async, report_async

__all__ = ["install"]

LOG = logging.getLogger(__name__)


class Trace(Protocol):
    """verifiers' trace: one trajectory; ``id`` is the session of its turns."""

    id: str
    reward: float


class Episode(Protocol):
    """verifiers' episode: the traces of one run of an environment."""

    traces: list[Trace]


class TrainSink(Protocol):
    """prime-rl's, as far as it is read here.

    Attributes:
        pending_groups: episodes of groups that are not complete.
        pending_batch: traces that wait for a batch, by id.
        episode_by_trace: the episodes of those.
    """

    pending_groups: dict[str, list[Episode]]
    pending_batch: dict[str, Any]
    episode_by_trace: dict[str, Episode]


Traces = Mapping[str, Trace]
"""By their ids."""

_NONE: Traces = {}


class Reports:
    """Sends reports beside the orchestrator's work, in its event loop.

    Args:
        url: the lease's.
        token: bearer token of its callers.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url, self._token = url, token
        self._tasks: set[asyncio.Task[object]] = set()

    def end(self, traces: Iterable[str]) -> None:
        """No more turns of these will come."""
        for name in traces:
            self._begin(finish_async(self._url, name, self._token))

    def send(
        self, trained: Traces = _NONE, dropped: Traces = _NONE, withdrawn: Iterable[str] = ()
    ) -> None:
        """What became of these."""
        removed = list(withdrawn)
        if trained or dropped or removed:
            one, other = _rewards(trained), _rewards(dropped)
            self._begin(report_async(self._url, one, other, withdrawn=removed, token=self._token))

    async def wait_sent(self) -> None:
        """Wait until all of them have arrived, or were given up."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _begin(self, report: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(report)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _rewards(traces: Traces) -> dict[str, float | None]:
    return {name: _reward(trace) for name, trace in traces.items()}


def _reward(trace: Trace) -> float | None:
    try:
        return float(trace.reward)
    except UNREADABLE:
        return None


def traces_of(episodes: Iterable[Episode]) -> Traces:
    """The traces of episodes."""
    return {trace.id: trace for episode in episodes for trace in episode.traces}


def _read(read: Callable[[], Traces]) -> Traces:
    """What is laid out anew in another release is not reported, and trained on all the same."""
    try:
        return read()
    except UNREADABLE as error:
        LOG.warning("what becomes of these traces is not reported: %r", error)
        return {}


def _waiting(sink: TrainSink) -> Traces:
    """Traces that wait for a batch."""
    found = traces_of(sink.episode_by_trace[one] for one in sink.pending_batch)
    return {one: found[one] for one in sink.pending_batch}


def ending(own: Callable[..., Any], reports: Reports) -> Callable[..., Any]:
    """``TrainSink.process_episode``."""

    async def processed(sink: TrainSink, episode: Episode) -> None:
        reports.end(_read(lambda: traces_of([episode])))
        await own(sink, episode)

    return processed


def grouping(own: Callable[..., Any], reports: Reports) -> Callable[..., Any]:
    """``TrainSink.process_group``."""

    async def processed(sink: TrainSink, group_id: str) -> None:
        traces = _read(lambda: traces_of(sink.pending_groups.get(group_id, ())))
        await own(sink, group_id)
        reports.send(dropped=_without(traces, sink.pending_batch))

    return processed


def sweeping(own: Callable[..., Any], reports: Reports) -> Callable[..., Any]:
    """``TrainSink._maybe_batch``, which may cut a batch after it has dropped what is too old."""

    def swept(sink: TrainSink) -> Any:  # noqa: ANN401  # prime-rl's
        before = _read(lambda: _waiting(sink))
        batch = own(sink)
        trained = {} if batch is None else _read(lambda: traces_of(batch.cohort.episodes))
        gone = _without(before, sink.pending_batch)
        reports.send(trained, _without(gone, trained))
        return batch

    return swept


def withdrawing(own: Callable[..., Any], reports: Reports) -> Callable[..., Any]:
    """``EvalSink.process_group``."""

    def processed(sink: Any, group_id: str) -> None:  # noqa: ANN401  # prime-rl's
        traces = _read(lambda: traces_of(sink.pending_groups.get(group_id, ())))
        own(sink, group_id)
        reports.send(withdrawn=traces)

    return processed


def _without(traces: Traces, others: Container[str]) -> Traces:
    return {name: trace for name, trace in traces.items() if name not in others}


_INSIDE: Mapping[tuple[str, str, str], Callable[..., Callable[..., Any]]] = {
    ("train_sink", "TrainSink", "process_episode"): ending,
    ("train_sink", "TrainSink", "process_group"): grouping,
    ("train_sink", "TrainSink", "_maybe_batch"): sweeping,
    ("eval_sink", "EvalSink", "process_group"): withdrawing,
}


def install(package: str = "prime_rl.orchestrator", url: str = "", token: str = "") -> Reports:
    """Have an orchestrator report; call it once in its process, before it starts.

    Args:
        package: prime-rl's, with its sinks.
        url: the lease's; by default from the environment.
        token: likewise.

    Raises:
        ImportError: prime-rl is not installed.
        AttributeError: its sinks are of another release; nothing is changed then.
        KeyError: no URL is given, and ``ROSE_ROUTER_URL`` is not set.
    """
    have = os.environ
    reports = Reports(url or have["ROSE_ROUTER_URL"], token or have.get("ROSE_TURN_TOKEN", ""))
    found = [
        (getattr(importlib.import_module(f"{package}.{module}"), owner), method, inside)
        for (module, owner, method), inside in _INSIDE.items()
    ]
    own = [getattr(owner, method) for owner, method, _ in found]  # all or nothing
    for (owner, method, inside), before in zip(found, own, strict=True):
        setattr(owner, method, inside(before, reports))
    return reports


def main() -> None:
    """``orchestrator``, with reports."""
    install()
    importlib.import_module("prime_rl.entrypoints.orchestrator").main()


if __name__ == "__main__":
    main()
