"""What a turn must be, whatever happened to its engines; every complaint is one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.fire.fleet import Lease
from rose_engines.fake.model import Prefix


@dataclass(frozen=True)
class Answer:
    """A turn as its caller got it, in whatever dialect.

    Attributes:
        spans: ``weight_versions`` of the reply.
        rose: what only the router knows of it.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: list[Mapping[str, Any]]
    finish: str
    rose: Mapping[str, Any]


def complaints(lease: Lease, prompt: Sequence[int], most: int, answer: Answer) -> list[str]:
    """What is wrong with an answer; an aborted one may be short, never wrong."""
    found = [*_whole(most, answer), *_spans(lease, answer), *_engines(lease, answer)]
    if lease.reference:
        wanted = lease.reference[tuple(prompt)][: len(answer.tokens)]
        found += [] if answer.tokens == wanted else [f"tokens {answer.tokens}, not {wanted}"]
    elif not found:
        found += _stub_tokens(prompt, answer)
    return found


def _whole(most: int, answer: Answer) -> list[str]:
    if len(answer.logprobs) != len(answer.tokens):
        return [f"{len(answer.logprobs)} log-probs for {len(answer.tokens)} tokens"]
    if answer.finish == "abort":
        return []
    if answer.finish != "length" or len(answer.tokens) != most:
        return [f"finish {answer.finish} after {len(answer.tokens)} of {most} tokens"]
    return []


def _spans(lease: Lease, answer: Answer) -> list[str]:
    position = 0
    for span in answer.spans:
        if span["start"] != position or span["end"] <= position:
            return [f"spans {answer.spans}"]
        if not span["version"].startswith(f"{lease.run}@"):
            return [f"a version of another lease: {span}"]
        position = span["end"]
    return [] if position == len(answer.tokens) else [f"spans cover {position} tokens"]


def _engines(lease: Lease, answer: Answer) -> list[str]:
    ours = {engine.name for engine in lease.engines}
    met = {leg["engine"] for leg in answer.rose["engines"]}
    return [] if met <= ours else [f"engines of another lease: {met - ours}"]


def _stub_tokens(prompt: Sequence[int], answer: Answer) -> list[str]:
    prefix = Prefix(prompt)
    for span in answer.spans:
        for index in range(span["start"], span["end"]):
            token, logprob = prefix.next_token(span["version"])
            if (token, logprob) != (answer.tokens[index], answer.logprobs[index]):
                return [f"token {index} is not what {span['version']} makes of its prefix"]
            prefix.append(token)
    return []
