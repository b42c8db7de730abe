"""``rose explain lease|pool NAME``: which replicas were considered, and why each was lent or not.

The question is an annotation, the answer comes in the object's status: no way to the operator and
no rights besides those on the object are needed. Who may only read gets the conditions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from rose_cli.ops.cluster import Cluster, connection_flags, run, until
from rose_cli.ops.errors import NotAllowed
from rose_cli.ops.tables import Row, table
from rose_core.api import EXPLAIN_ANNOTATION, Explanation, RolloutLease, ServingPool
from rose_wire.flags import amount

KINDS: dict[str, type[RolloutLease | ServingPool]] = {"lease": RolloutLease, "pool": ServingPool}


def main(argv: list[str]) -> int:
    """Ask the operator and print its answer."""
    parser = argparse.ArgumentParser(
        "rose explain", description=__doc__, parents=[connection_flags()]
    )
    parser.add_argument("kind", choices=list(KINDS), help="whose replicas are asked about")
    parser.add_argument("name", help="of the lease or pool")
    parser.add_argument("--reason", help="only replicas with this reason")
    parser.add_argument("--timeout", type=amount, default=30.0, help="seconds to wait")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    given = parser.parse_args(argv)
    return run("explain", given, lambda cluster: _explain(cluster, given))


def _explain(cluster: Cluster, given: argparse.Namespace) -> int:
    thing = cluster.get(KINDS[given.kind], given.name)
    answer = _ask(cluster, given)
    if given.output == "json":
        said = answer.as_dict() if answer else {"conditions": _conditions(thing)}
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
        return 0
    sys.stdout.write(_text(given, cluster.get(KINDS[given.kind], given.name), answer))
    return 0


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


def _not_twice(row: Row, told: str) -> Row:
    """The condition without a message that stands above it already."""
    message = str(row["message"])
    return {**row, "message": "(above)"} if message and message in told else row


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
