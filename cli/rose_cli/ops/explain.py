"""``rose explain lease|pool NAME``: which replicas were considered, and why each was lent or not.

The question is an annotation, the answer comes in the object's status: no way to the operator and
no rights besides those on the object are needed. Who may only read gets the conditions.

With the folder of the lease's model (``--rollout``) it says in GiB what each setting would make
lendable on the replica that has least, whether the lease's engine would fit, and what the serving
owner would give up for it (``rose_simulate.advice.memory``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rose_cli.ops.cluster import Cluster, connection_flags, run, until
from rose_cli.ops.errors import NotAllowed
from rose_cli.ops.tables import Row, output_flag, table
from rose_core.api import EXPLAIN_ANNOTATION, Explanation, RolloutLease, ServingPool
from rose_core.api.common import ReplicaVerdict
from rose_core.devices.memory import MemorySum, in_gib
from rose_simulate.advice.errors import AdviceError
from rose_simulate.advice.memory import ServingEngineKind, changes
from rose_wire.flags import VerbParser, amount, count

KINDS: dict[str, type[RolloutLease | ServingPool]] = {"lease": RolloutLease, "pool": ServingPool}


def main(argv: list[str]) -> int:
    """Ask the operator and print its answer."""
    parser = VerbParser("rose explain", description=__doc__, parents=[connection_flags()])
    parser.add_argument("kind", choices=list(KINDS), help="whose replicas are asked about")
    parser.add_argument("name", help="of the lease or pool")
    parser.add_argument("--reason", help="only replicas with this reason")
    memory = parser.add_argument_group("what other settings would lend")
    add = memory.add_argument
    add("--rollout", type=Path, metavar="DIR", help="model of the lease")
    add("--serving", type=Path, metavar="DIR", help="model that serves: its price in KV tokens")
    add(
        "--engine",
        type=ServingEngineKind,
        choices=list(ServingEngineKind),
        default=ServingEngineKind.SGLANG,
        help="that serves",
    )
    add("--serving-gpus", type=count, default=1, help="of one replica")
    add("--serving-besides", type=amount, default=3.0, metavar="GiB", help="graphs, activations")
    add("--rollout-besides", type=amount, metavar="GiB", help="measured; absent = estimated")
    add("--kv-tokens", type=count, help="absent = the lease's; 16384 for a pool")
    add("--max-running", type=count, help="turns at a time; absent = the lease's; 8 for a pool")
    parser.add_argument("--timeout", type=amount, default=30.0, help="seconds to wait")
    output_flag(parser, one_table=False)
    given = parser.parse_args(argv)
    return run("explain", given, lambda cluster: _explain(cluster, given))


def _explain(cluster: Cluster, given: argparse.Namespace) -> int:
    thing = cluster.get(KINDS[given.kind], given.name)
    answer = _ask(cluster, given)
    if given.output == "json":
        shown = answer.as_dict() if answer else {"conditions": _conditions(thing)}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
        return 0
    thing = cluster.get(KINDS[given.kind], given.name)
    sys.stdout.write(_text(given, thing, answer))
    if given.rollout is None or answer is None:
        return 0
    try:
        sys.stdout.write(f"\n{memory_text(given, thing, answer)}")
    except AdviceError as error:
        sys.stderr.write(f"rose explain: {error}\n")
        return 1
    return 0


def memory_text(
    given: argparse.Namespace,
    thing: RolloutLease | ServingPool,
    answer: Explanation,
) -> str:
    """What other settings would lend, on the replica that lends least.

    Raises:
        AdviceError: a model's folder does not say how large it is, or cannot be read here.
    """
    try:
        # Models are read with numpy, which nothing else for people on a cluster needs.
        from rose_simulate.verbs.advise_memory import (  # noqa: PLC0415
            fp8_weights,
            rollout_of,
            serving_of,
            show_changes,
        )
    except ModuleNotFoundError as error:
        message = f"a model's folder is read with {error.name}: install rose-gpu[simulate]"
        raise AdviceError(message) from error
    known = [(parts, one.replica) for one in answer.verdicts if (parts := _parts(one)) is not None]
    if not known:
        return "no replica says how much memory its serving uses\n"
    parts, replica = min(known, key=lambda pair: pair[0].lends)
    spec = thing.spec if isinstance(thing, RolloutLease) else None
    size = rollout_of(
        given.rollout,
        given.kv_tokens or (spec.kv_tokens if spec else 16_384),
        given.max_running or (spec.max_trajectories_per_slot if spec else 8),
        {name: str(value) for name, value in spec.engine_arguments.items()} if spec else {},
        given.rollout_besides,
    )
    engine = given.engine
    if isinstance(thing, ServingPool):
        engine = ServingEngineKind(thing.spec.engine.kind.value)
    serving = None
    if given.serving is not None:
        serving = serving_of(given.serving, given.serving_gpus, given.serving_besides, engine)
    found = changes(parts, size, engine, serving=serving, fp8_weights=fp8_weights(given.rollout))
    head = (
        f"memory of {replica}, which lends least of {len(known)}: {in_gib(parts.total)} in all, "
        f"serving used up to {in_gib(parts.serving)}, headroom {in_gib(parts.headroom)}\n"
    )
    measured = given.rollout_besides is not None
    return head + show_changes(found, size, measured=measured)


def _parts(verdict: ReplicaVerdict) -> MemorySum | None:
    memory = verdict.memory
    if memory is None:
        return None
    sizes = (memory.total, memory.serving, memory.headroom, memory.settled_headroom, memory.dormant)
    return MemorySum(*(size << 20 for size in sizes))


def _ask(cluster: Cluster, given: argparse.Namespace) -> Explanation | None:
    """The operator's answer; None when the person may not ask."""
    request = uuid4().hex[:16]
    found: list[Explanation] = []

    def answered() -> bool:
        explanation = cluster.get(KINDS[given.kind], given.name).status.explanation
        if explanation is not None and explanation.request == request:
            found.append(explanation)
        return bool(found)

    try:
        with _asking(cluster, given, request):
            until(
                answered,
                given.timeout,
                f"the operator has not answered within {given.timeout:.0f} s; does one run and "
                "lead? (kubectl get deployment -A -l app.kubernetes.io/name=rose-operator)",
            )
    except NotAllowed as error:
        sys.stderr.write(f"rose explain: you may not ask ({error}); this is what the status says\n")
        return None
    return found[0]


@contextmanager
def _asking(cluster: Cluster, given: argparse.Namespace, request: str) -> Iterator[None]:
    kind = KINDS[given.kind]
    cluster.patch(kind, given.name, _annotation(request))
    try:
        yield
    finally:
        cluster.patch(kind, given.name, _annotation(None))


def _annotation(request: str | None) -> dict[str, object]:
    return {"metadata": {"annotations": {EXPLAIN_ANNOTATION: request}}}


def _text(
    given: argparse.Namespace, thing: RolloutLease | ServingPool, answer: Explanation | None
) -> str:
    of = f" of pool {thing.spec.pool_ref.key}" if isinstance(thing, RolloutLease) else ""
    parts = [f"{given.kind} {thing.metadata.key}{of}\n"]
    if answer is not None:
        parts.append(f"{answer.summary}\n")
    parts.append(_calling(thing))
    rows = _conditions(thing)
    if answer is not None:
        rows = [_not_twice(row, answer.summary) for row in rows]
    parts.append(f"\n{table(rows)}")
    if answer is not None:
        parts.append(_verdicts(answer, given.reason))
    return "".join(parts)


def _calling(thing: RolloutLease | ServingPool) -> str:
    """Where turns go and what they bring; nothing while there is no router."""
    if not isinstance(thing, RolloutLease) or not thing.status.router_url:
        return ""
    namespace, audience = thing.metadata.namespace, f"rose-lease/{thing.metadata.key}"
    return (
        f"turns go to {thing.status.router_url}; a token for them (401 without):\n"
        f"  kubectl create token ACCOUNT --namespace {namespace} --audience {audience}\n"
    )


def _not_twice(row: Row, shown: str) -> Row:
    """The condition without a message that stands above it already."""
    message = str(row["message"])
    return {**row, "message": "(above)"} if message and message in shown else row


def _conditions(thing: RolloutLease | ServingPool) -> list[Row]:
    return [
        {"condition": one.type, "status": one.status, "reason": one.reason, "message": one.message}
        for one in thing.status.conditions
    ]


def _verdicts(answer: Explanation, only: str | None) -> str:
    if not answer.verdicts:
        return "\nno replica was considered\n"
    counts = Counter(one.reason for one in answer.verdicts)
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    head = ", ".join(f"{count} {reason}" for reason, count in ranked)
    rows: list[Row] = [
        {"replica": one.replica, "reason": one.reason, "why": one.message}
        for one in answer.verdicts
        if only in {None, one.reason}
    ]
    omitted = f"{answer.omitted} more replicas are not listed\n" if answer.omitted else ""
    return f"\n{len(answer.verdicts)} replicas: {head}\n{table(rows)}{omitted}"
