"""Specifications, effects and results of commands, as records have them and as hosts use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from rose_core.sandboxes.networks import Network
from rose_core.sandboxes.outside import EgressEffect
from rose_sandbox.errors import TokensDiffer
from rose_sandbox.runtimes.runtime import ExecResult, Limits, SandboxSpec
from rose_weights.store.records import OutsideEffect, TurnRecord


def check_tokens(record: TurnRecord, tokens: str) -> None:
    """Whether a record goes with the tokens of this digest; empty: it may go with any.

    Raises:
        TokensDiffer: it does not.
    """
    if tokens and tokens != record.tokens:
        raise TokensDiffer(
            f"turn {record.turn} of session {record.session} goes with tokens "
            f"{record.tokens[:16]}, not {tokens[:16]}: restore the turn whose tokens you have"
        )


def written_spec(spec: SandboxSpec) -> dict[str, Any]:
    """A specification, as a record has it."""
    return {**asdict(spec), "environment": dict(spec.environment)}


def read_spec(document: Mapping[str, Any], key: str) -> SandboxSpec:
    """The specification of a record, for a sandbox of this key."""
    limits, networks = Limits(**document["limits"]), document.get("networks")
    if networks is not None:
        networks = msgspec.convert(networks, tuple[Network, ...])
    environment = dict(document["environment"])
    return SandboxSpec(key, document["image"], limits, environment, document["folder"], networks)


def read_effect(one: OutsideEffect) -> EgressEffect:
    """An effect of a record."""
    return EgressEffect(one.turn, one.method, one.target, one.status, one.keyed)


def written_effect(one: EgressEffect) -> OutsideEffect:
    """An effect, as a record has it."""
    return OutsideEffect(one.turn, one.method, one.target, one.status, one.keyed)


def written_result(result: ExecResult) -> dict[str, Any]:
    """What a command gave, as a record has it; its streams are bytes."""
    made = asdict(result)
    return {
        **made,
        "stdout": result.stdout.decode("latin-1"),
        "stderr": result.stderr.decode("latin-1"),
    }


def read_result(document: Mapping[str, Any]) -> ExecResult:
    """What a command of a record gave."""
    streams = {name: str(document[name]).encode("latin-1") for name in ("stdout", "stderr")}
    return ExecResult(**{**document, **streams})
