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


ABORTED = "sglang.srt.managers.scheduler._make_abort_req"


class OwnLabels:
    """The same where requests are computed by versions of several runs: each has its own label.

    Args:
        label_of: label of the weights that a request is computed with now.
    """

    def __init__(self, label_of: Callable[[Any], str]) -> None:
        self._label_of = label_of

    def around_accept(self, original: Callable[..., None], accumulator: Any, *, req: Any) -> None:  # noqa: ANN401
        """Hook: a request's new tokens are added to the outgoing batch."""
        accumulator.current_weight_version = self._label_of(req)
        around_accept(original, accumulator, req=req)

    def around_abort(self, original: Callable[..., Any], req: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401
        """Hook: a request ends outside the output stream."""
        from sglang.srt.utils.weight_versions import compute_weight_version_spans  # noqa: PLC0415

        made = original(req, *more, **named)
        made.weight_versions = compute_weight_version_spans(
            req.weight_version_events,
            current_version=self._label_of(req),
            num_output_tokens=len(req.output_ids),
        )
        return made
