"""``rose vacate``: wait until no rollout engine holds this pod's GPUs.

A serving pod runs it as an init container. It asks the engine host of its node, which it reaches
through the chart's Service (``internalTrafficPolicy: Local``: a Service that leads to this node
only), until the host says that the GPUs are free or the deadline has passed. It changes nothing:
that a pod is not ready is what makes the guard take the GPUs back.

GPUs are those of ``--gpus``, else of ``NVIDIA_VISIBLE_DEVICES``, which the container runtime sets
to what the pod was given; ``all`` and nothing mean every GPU of the node. Exit code 0: they are
free. 1: they were not by the deadline; the message names who holds them. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rose_agent.host.vacancy.holders import Vacancy
from rose_core.unreadable import UNREADABLE
from rose_wire import flags
from rose_wire.flags import VerbParser

_DEFAULT_URL = "http://rose-engine-host.rose-system.svc:9103"
_ANSWER_SECONDS = 3.0


class _NoAnswer(Exception):
    """The engine host does not answer, or not as it should."""


@dataclass(frozen=True)
class VacateOptions:
    """What is waited for.

    Attributes:
        gpus: UUIDs; none = every GPU of the node.
        absent_passes: a node whose host never answers counts as free at the deadline.
    """

    url: str
    gpus: tuple[str, ...]
    deadline_seconds: float
    poll_seconds: float = 1.0
    absent_passes: bool = False


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = VerbParser(
        prog="rose vacate", description="Wait until no rollout engine holds this pod's GPUs."
    )
    made.add_argument(
        "--url", type=flags.web, default=_DEFAULT_URL, help="the engine host's pages on this node"
    )
    made.add_argument("--gpus", help="comma-separated UUIDs (default: NVIDIA_VISIBLE_DEVICES)")
    made.add_argument("--deadline-seconds", type=flags.amount, default=300.0, help="longest wait")
    made.add_argument(
        "--poll-seconds", type=flags.amount, default=1.0, help="time between two questions"
    )
    made.add_argument(
        "--absent",
        choices=["fail", "pass"],
        default="fail",
        help="what a host that never answers means at the deadline; pass = this node lends nothing",
    )
    return made


def visible_gpus(given: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """UUIDs of this container's GPUs; empty = every GPU of the node.

    Raises:
        ValueError: a GPU is named by something else than its UUID.
    """
    text = given if given is not None else environment.get("NVIDIA_VISIBLE_DEVICES", "")
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if names in {("all",), ("void",), ("none",)}:
        return ()
    wrong = [name for name in names if not name.startswith("GPU-")]
    if wrong:
        raise ValueError(f"GPU {wrong[0]!r} is no UUID (GPU-...); give --gpus UUID,UUID")
    return names


def ask(wish: VacateOptions) -> Vacancy:
    """Ask once.

    Raises:
        _NoAnswer: the host does not answer, or not as it should.
    """
    query = urllib.parse.urlencode([("gpu", gpu) for gpu in wish.gpus])
    url = f"{wish.url.rstrip('/')}/vacated?{query}"
    if not url.startswith(("http://", "https://")):
        raise _NoAnswer(f"{wish.url} is no http address")
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310  # checked
            return msgspec.json.decode(answer.read(), type=Vacancy)
    except (OSError, http.client.HTTPException, *UNREADABLE) as error:
        raise _NoAnswer(f"no engine host answers at {wish.url}: {error}") from error


def wait(
    wish: VacateOptions,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ask until the GPUs are free or the deadline has passed.

    Args:
        wish: what is waited for.
        report: takes what people should read; called when it changes.
        clock: monotonic seconds.
        sleep: pauses between two questions.

    Returns:
        Whether they are free.
    """
    deadline = clock() + wish.deadline_seconds
    answered, last = False, ""
    while True:
        try:
            vacancy = ask(wish)
            if vacancy.free:
                return True
            answered, now = True, _holders(vacancy)
        except _NoAnswer as error:
            now = str(error)
        if now != last:
            report(f"waiting: {now}")
            last = now
        if clock() >= deadline:
            break
        sleep(min(wish.poll_seconds, max(0.0, deadline - clock())))
    if not answered and wish.absent_passes:
        report("no engine host answered: this node lends nothing")
        return True
    report(f"not free after {wish.deadline_seconds:.0f} s: {last}{'' if answered else _ABSENT}")
    return False


_ABSENT = (
    "; is lending.enabled, and does a NetworkPolicy let this namespace reach port 9103? "
    "On nodes that lend nothing use --absent pass"
)


def _holders(vacancy: Vacancy) -> str:
    named = ", ".join(f"{holder.slot} ({holder.state})" for holder in vacancy.holders)
    return f"rollout engines hold the GPUs: {named}"


def main(argv: Sequence[str]) -> int:
    """Entry of the verb.

    Returns:
        0 free, 1 not free by the deadline, 2 wrong usage.
    """
    arguments = parser().parse_args(argv)
    try:
        gpus = visible_gpus(arguments.gpus, os.environ)
    except ValueError as error:
        sys.stderr.write(f"rose vacate: {error}\n")
        return 2
    wish = VacateOptions(
        arguments.url,
        gpus,
        arguments.deadline_seconds,
        arguments.poll_seconds,
        absent_passes=arguments.absent == "pass",
    )

    def show(text: str) -> None:
        sys.stderr.write(f"rose vacate: {text}\n")

    return 0 if wait(wish, show) else 1
