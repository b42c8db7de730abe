"""Weight-version spans in every event of a stream, not only in the last one.

Stock SGLang says which versions sampled a request's tokens when the request has finished. A router
whose stream is cut by a death or a freeze never gets that event and would have to sample the tokens
it holds again. This hook fills the same field for unfinished requests, from the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
)


def around_accept(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:  # noqa: ANN401
    """Hook: a request's new tokens are added to the outgoing batch."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans  # noqa: PLC0415

    before = len(accumulator.weight_versions)
    original(accumulator, req=req)
    added = len(accumulator.weight_versions) > before
    if added and accumulator.weight_versions[-1] is None:
        accumulator.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )
