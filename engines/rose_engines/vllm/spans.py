"""Weight-version spans in every event of a stream, not only in the last one.

vLLM notes which version sampled which of a request's tokens and says so when the request has ended.
A router whose stream is cut never gets that event (``rose_engines.sglang.spans`` has the same).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OWNER = "vllm.v1.engine.output_processor.RequestState"
METHOD = "_new_completion_output"


def in_every_event(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same output, with the spans so far."""

    def make(state: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        output = original(state, *arguments, **named)
        if output.weight_versions is None:
            output.weight_versions = state._weight_version_spans()  # noqa: SLF001
        return output

    return make
