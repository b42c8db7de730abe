"""What a task's Dockerfile asks for, as steps in a sandbox that runs already; next: ``harbor``.

Nothing is built: a sandbox begins as an image of its host, whatever ``FROM`` says.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_IGNORED = {"FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "SHELL", "STOPSIGNAL", "HEALTHCHECK"}
"""What says nothing of files: a sandbox's commands are the agent's."""
_HERE = re.compile(r"(?<!<)<<-?[\"']?[A-Za-z_]")
"""The begin of a here-document: its lines would be read as instructions."""


class UnknownInstruction(ValueError):
    """A Dockerfile asks for what cannot be played in a running sandbox; the text says what."""


@dataclass(frozen=True)
class Step:
    """One of them.

    Attributes:
        folder: where it is played.
        command: for the shell; empty: files are copied.
        copies: names below the folder of the Dockerfile.
        target: where they go, absolute; with a slash at its end it is a folder.
    """

    folder: str
    command: str = ""
    copies: tuple[str, ...] = ()
    target: str = ""


@dataclass(frozen=True)
class Plan:
    """All of a Dockerfile.

    Attributes:
        steps: in order.
        environment: of every command.
        folder: where commands start; None: where the sandbox's do.
    """

    steps: tuple[Step, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None


def plan(text: str) -> Plan:
    """What a Dockerfile asks for.

    Raises:
        UnknownInstruction: an instruction, or a form of one, that cannot be played.
    """
    folder, environment, steps = "/", dict[str, str](), list[Step]()
    moved = False
    for instruction, rest in _supported(text):
        if instruction == "WORKDIR":
            folder, moved = str(PurePosixPath(folder) / rest), True
            steps.append(Step(folder, "true"))
        elif instruction == "ENV":
            environment |= _variables(rest)
        elif instruction == "RUN":
            steps.append(_run(folder, rest))
        elif instruction == "COPY":
            steps.append(_copy(folder, rest))
        else:
            raise UnknownInstruction(f"{instruction} cannot be played in a sandbox that runs")
    return Plan(tuple(steps), environment, folder if moved else None)


def _run(folder: str, rest: str) -> Step:
    if rest.startswith("--"):
        raise UnknownInstruction(f"RUN {rest[:40]}: no mounts")
    parts = _list(rest)
    return Step(folder, shlex.join(parts) if parts else rest)


def _copy(folder: str, rest: str) -> Step:
    *names, target = _list(rest) or shlex.split(rest) or [""]
    if not names or any(re.search(r"^--|[*?\[]", name) for name in names):
        raise UnknownInstruction(f"COPY {rest[:60]}: plain names alone")
    slash = "/" if target.endswith(("/", "/.")) or target == "." else ""
    where = str(PurePosixPath(folder) / target)
    return Step(folder, copies=tuple(names), target=where.rstrip("/") + slash)


def _supported(text: str) -> Iterator[tuple[str, str]]:
    """The instructions that say something of files, without what could be misread."""
    stages = 0
    for instruction, rest in _instructions(text):
        stages += instruction == "FROM"
        if stages > 1:
            raise UnknownInstruction(f"FROM {rest[:40]}: a second stage")
        if instruction in _IGNORED:
            continue
        if _HERE.search(rest):
            raise UnknownInstruction(f"{instruction} {rest[:40]}: no here-documents")
        if instruction != "RUN" and "$" in rest:
            raise UnknownInstruction(
                f"{instruction} {rest[:60]}: no variables; write out what it says"
            )
        yield instruction, rest


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction:
            yield instruction.upper(), rest.strip()


def _list(rest: str) -> list[str]:
    """The words of a list in JSON; none of something else, such as a test: ``[ -e a ]``."""
    try:
        parts = json.loads(rest)
    except ValueError:
        return []
    return parts if isinstance(parts, list) and all(isinstance(one, str) for one in parts) else []


def _variables(rest: str) -> dict[str, str]:
    parts = shlex.split(rest)
    if parts and "=" not in parts[0]:  # the older form: one name, and the rest is its value
        return {parts[0]: " ".join(parts[1:])}
    return dict(instruction.split("=", maxsplit=1) for instruction in parts)
