"""slime says what became of its samples, by two of its own hooks.

    --rollout-sample-filter-path rose_trainer.adapters.slime.mark_trained
    --rollout-all-samples-process-path rose_trainer.adapters.slime.report_samples
    --router-policy consistent_hashing

At the end of a round slime calls the first with the groups that it trains on, then the second with
all that have ended, also those that its filters dropped. Under that policy alone it sends the
``session_id`` of a sample with its turns. ``ROSE_ROUTER_URL`` and ``ROSE_TURN_TOKEN`` of the
process that manages rollouts are the lease's. ``slime`` itself is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from rose_trainer.adapters.report import report

__all__ = ["mark_trained", "report_samples"]

_MARK = "rose_trained"


class Sample(Protocol):
    """What is needed of slime's ``Sample``."""

    session_id: str | None
    reward: Any
    metadata: dict[str, Any]
    remove_sample: bool


Samples = Iterable["Sample | Samples"]
"""Groups of samples; a custom generate function may give lists instead of samples."""


def mark_trained(args: object, data: Samples) -> None:
    """``--rollout-sample-filter-path``: these are trained on, unless a filter removed them."""
    del args
    for sample in _each(data):
        sample.metadata[_MARK] = not sample.remove_sample


def report_samples(args: object, samples: Samples, data_source: object) -> None:
    """``--rollout-all-samples-process-path``: what is not marked was dropped.

    Raises:
        KeyError: ``ROSE_ROUTER_URL`` is not set.
    """
    del data_source
    url, token = os.environ["ROSE_ROUTER_URL"], os.environ.get("ROSE_TURN_TOKEN", "")
    trained: dict[str, float | None] = {}
    dropped: dict[str, float | None] = {}
    for sample in _each(samples):
        if sample.session_id:
            fate = trained if sample.metadata.pop(_MARK, False) else dropped
            fate[sample.session_id] = _reward(sample, getattr(args, "reward_key", None))
    # A trajectory of which one sample was trained on was trained on.
    report(url, trained, {key: dropped[key] for key in dropped.keys() - trained}, token=token)


def _each(samples: Samples) -> Iterator[Sample]:
    for one in samples:
        if isinstance(one, list):
            yield from _each(one)
        else:
            yield one  # type: ignore[misc]  # a Protocol that isinstance cannot narrow to


def _reward(sample: Sample, key: str | None) -> float | None:
    value = sample.reward[key] if key and sample.reward is not None else sample.reward
    return float(value) if isinstance(value, int | float) else None
