"""Says in every event whether the engine's log-probs are scaled by the temperature.

SGLang divides the logits by the temperature before it takes log-probs, unless it runs with
``SGLANG_RETURN_ORIGINAL_LOGPROB``; its replies do not tell which. Whoever trains on them has to
know, so the answer is put beside the version spans, in the process that writes the replies.
"""

from __future__ import annotations

import os
from typing import Any

from rose_core.rollouts.requests.logprobs import SCALE, LogitScale

LOGPROBS = "sglang.srt.utils.weight_versions.add_weight_versions_to_meta_info"
ORIGINAL_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def scale() -> LogitScale:
    """What this engine does, by the variable that its sampler reads, as that reads it."""
    original = os.environ.get(ORIGINAL_VARIABLE, "").lower() in {"true", "1"}
    return LogitScale.ORIGINAL if original else LogitScale.TEMPERATURE


class LogprobHook:
    """The hook; what the engine does is settled when it starts."""

    def __init__(self) -> None:
        self._scale = scale().value

    def before_versions(self, meta_info: dict[str, Any], *_: object, **__: object) -> None:
        """Hook: a reply's ``meta_info`` is about to get its version spans."""
        meta_info[SCALE] = self._scale
