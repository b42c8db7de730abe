"""Log-probs as SGLang's: of the logits over the temperature, before top-k and top-p.

vLLM's ``processed_logprobs`` are of the logits after bias, penalties and temperature, as SGLang's
are, but also after top-k and top-p have dropped tokens. Whoever trains on tokens of both engines
must have one distribution, so the log-probs are taken before the filters here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OWNER = "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler"
METHODS = ("forward_native", "forward_cpu")
"""Implementations that a sampler with processed log-probs chooses from on GPU and CPU."""


def unfiltered(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same sampling, with log-probs of what it samples from before it is filtered."""

    def sample(
        sampler: Any,  # noqa: ANN401
        logits: Any,  # noqa: ANN401
        generators: Any,  # noqa: ANN401
        k: Any,  # noqa: ANN401
        p: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        import torch  # noqa: PLC0415  # only inside engines

        if k is None and p is None:
            return original(sampler, logits, generators, k, p)
        before = logits.log_softmax(dim=-1, dtype=torch.float32)  # the filters write in place
        sampled, scores = original(sampler, logits, generators, k, p)
        return sampled, None if scores is None else before

    return sample
