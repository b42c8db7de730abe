"""How the two kinds of engines are asked for tokens, and how their events are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_COUNT = b'"completion_tokens":'


@dataclass(frozen=True)
class Dialect:
    """One engine's way to stream a completion of token ids.

    Attributes:
        path: where it is asked.
        body: prompt and output length -> request.
        count: a line of the answer and the tokens before it -> tokens so far; 0 = tells nothing.
    """

    path: str
    body: Callable[[list[int], int], dict[str, Any]]
    count: Callable[[bytes, int], int]


def _sglang_body(prompt: list[int], output: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "stream": True, "sampling_params": sampling}


def tokens_in(line: bytes, _before: int = 0) -> int:
    """Output tokens so far as an event of ``/generate`` tells them; 0 = not an event."""
    if not line.startswith(b"data: {"):
        return 0
    at = line.rfind(_COUNT)
    digits = line[at + len(_COUNT) : at + len(_COUNT) + 8].strip() if at >= 0 else b""
    count = 0
    for byte in digits:
        if not 48 <= byte <= 57:
            break
        count = 10 * count + byte - 48
    return count


def _vllm_body(prompt: list[int], output: int) -> dict[str, Any]:
    wanted = {"temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": "serving", "prompt": prompt, "max_tokens": output, **wanted}


def events_in(line: bytes, before: int) -> int:
    """One event a token, as ``/v1/completions`` of vLLM streams; an error is an event without."""
    return before + 1 if line.startswith(b"data: {") and b'"choices":[{' in line else 0


SGLANG = Dialect("/generate", _sglang_body, tokens_in)
VLLM = Dialect("/v1/completions", _vllm_body, events_in)
