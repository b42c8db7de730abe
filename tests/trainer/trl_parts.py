"""What a run of TRL on a CPU needs and TRL does not have: its attention kernel, in plain torch."""

from __future__ import annotations

from typing import Any

import torch

CHAT = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}|answer|{% endif %}"
)
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "|answer|",
    "fields": {"content": {"content": "text"}},
}


def by_place(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward: fake engines give the members of a group one answer, so their places must differ.

    TRL's rollout process imports it by name.
    """
    return [float(place % 2) for place, _ids in enumerate(completion_ids)]


class PlainAttention:
    """``flash_attn_varlen_func`` as TRL calls it, segment by segment."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        *_: object,
        softmax_scale: float | None = None,
        **__: Any,  # noqa: ANN401  # causal, windows
    ) -> torch.Tensor:
        """Causal attention; a segment's queries are the last of its keys."""
        parts = []
        for begin, end, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
            q, k, v = query[begin:end], key[first:last], value[first:last]
            causal = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=causal, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)
