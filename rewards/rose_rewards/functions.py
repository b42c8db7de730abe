"""The platform's list of reward functions: YAML, a name and what stands behind it.

    exact: {rule: exact}
    gsm8k: {rule: math, seconds: 10}
    unit-tests: {module: "checks:run", path: /teams/a, team: a, seconds: 60, memoryMebibytes: 2048}
    judge: {judge: http://router-research-judge.rose-routers.svc:8000, tokenFile: /etc/rose/judge}
    programs: {sandbox: http://sandboxes:7600, tokenFile: /etc/rose/sandboxes, atOnce: 16}

A function with a team may be called by that team alone, and its code runs under a user of that
team's own. Next step: ``gateway`` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pydantic.alias_generators
import yaml

from rose_rewards.errors import BadFunctions
from rose_wire import problems

# Stands for the functions that have no team, where a name is needed: tokens, KEDA, the chart.
SHARED = "shared"
# As checkers of programming contests' data sets have it: twenty cases of the longest time.
_PROGRAM_SECONDS = 120.0
_PROMPT = (
    "Task:\n{task}\n\nExpected answer:\n{expected}\n\nAnswer:\n{answer}\n\n"
    "Reply with one number from 0 (wrong) to 1 (right) and nothing else."
)


class RewardFunction(pydantic.BaseModel):
    """One function; exactly one of ``rule``, ``module``, ``judge`` and ``sandbox`` is given.

    Attributes:
        rule: one of ``rose_rewards.rules`` and ``math_rule``.
        module: ``package.module:function`` of the team's own.
        path: folder that its module is found in.
        judge: URL of a lease whose model judges.
        sandbox: URL of sandbox hosts, where the program in the answer runs on cases.
        token_file: with what the judge's router, or the sandbox host, is called.
        model, prompt: what it is asked; the prompt names answer, expected and task.
        team: whose it is; empty = everybody may call it.
        image: that sandboxes begin as; has ``python3``.
        command: that runs a program, the shell's; ``{file}`` is where that lies.
        case_seconds: (``caseSeconds``) of processor time, that one case may take.
        partial: the reward is the share of cases that are passed; else all of them, or nothing.
        tolerance: of fractions that a program prints or returns, relative and absolute.
        disk_mebibytes: (``diskMebibytes``) that a program may write.
        at_once: sandboxes at a time, of all functions with this URL.
        seconds: longest time of one verification, 30 by default. Of a program processor time of
            all its cases together, 120 by default, three times that on the clock, and once more its
            host's part.
        memory_mebibytes: address space of one worker; memory of a program.
        network: whether its workers see one; a judge is called by the gateway, and no sandbox has
            one.
        correct_from: rewards from here on are of correct answers.
        tries: how often one is tried before it is lost; of 1, a late one gets no second worker. A
            judge that is away is asked until ``seconds`` are over, and that is no try; nor is a
            worker that was killed, up to five of them. Of 1 nothing ever runs twice.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid",
        alias_generator=pydantic.alias_generators.to_camel,
        populate_by_name=True,
        frozen=True,
    )

    rule: Literal["exact", "contains", "number", "math"] | None = None
    module: str | None = pydantic.Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    path: Path | None = None
    judge: str | None = pydantic.Field(default=None, pattern=r"^https?://")
    sandbox: str | None = pydantic.Field(default=None, pattern=r"^https?://")
    token_file: Path | None = None
    model: str = "default"
    prompt: str = _PROMPT
    team: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$|^$")] = ""
    seconds: float = pydantic.Field(default=30.0, gt=0, le=3600)
    memory_mebibytes: int = pydantic.Field(default=1024, ge=64, le=1 << 20)
    network: bool = False
    correct_from: float = 1.0
    tries: int = pydantic.Field(default=2, ge=1, le=10)
    image: str = "base"
    command: str = "python3 {file}"
    case_seconds: float = pydantic.Field(default=6.0, gt=0, le=600)
    partial: bool = False
    tolerance: float = pydantic.Field(default=1e-6, ge=0, lt=1)
    disk_mebibytes: int = pydantic.Field(default=256, ge=16, le=1 << 20)
    at_once: int = pydantic.Field(default=8, ge=1, le=4096)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _programs_have_longer(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("sandbox") is not None:
            return {"seconds": _PROGRAM_SECONDS, **given}
        return given

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> RewardFunction:
        kinds = (self.rule, self.module, self.judge, self.sandbox)
        if sum(one is not None for one in kinds) != 1:
            message = "give exactly one of rule, module, judge and sandbox"
            raise ValueError(message)
        if self.sandbox is not None and (self.network or "{file}" not in self.command):
            message = "a program has no network, and its command names {file}"
            raise ValueError(message)
        if self.team == SHARED:
            message = f"no team may be called {SHARED}: that means the functions without a team"
            raise ValueError(message)
        try:
            self.prompt.format_map({"answer": "", "expected": "", "task": ""})
        except (LookupError, ValueError, AttributeError) as error:
            message = (
                f"prompt: {error}; it may name {{answer}}, {{expected}} and {{task}}, "
                "and other braces stand twice"
            )
            raise ValueError(message) from error
        return self

    @property
    def takes_worker(self) -> bool:
        """Whether a worker computes it; a lease's engine or a sandbox host does the others."""
        return self.judge is None and self.sandbox is None

    @property
    def entry(self) -> str:
        """``module:function`` that a worker runs; of those that take one."""
        if self.rule == "math":
            return "rose_rewards.math_rule:math"
        return self.module or f"rose_rewards.rules:{self.rule}"


def read(path: Path) -> dict[str, RewardFunction]:
    """The functions by name.

    Raises:
        BadFunctions: the file cannot be read or says something else; where and what.
    """
    try:
        found = pydantic.TypeAdapter(dict[str, RewardFunction]).validate_python(
            yaml.safe_load(path.read_text())
        )
    except problems.FILE_ERRORS as error:
        message = f"--functions {path}: {problems.of_file(error)}; docs/rewards.md shows one"
        raise BadFunctions(message) from error
    return found
