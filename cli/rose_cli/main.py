"""``rose VERB ...``: finds the verb's module and hands it the rest of the arguments.

A verb's module is imported only when it is called, so the operator's image needs no engine
libraries and ``rose --help`` answers at once. Every verb is a function ``(argv) -> exit code``.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from rose_wire.flags import complaint

_INTERRUPTED = 130
_FIRST = 1  # process of a container


@dataclass(frozen=True)
class Verb:
    """One verb: where its function is, what it does, which extra brings its libraries."""

    module: str
    summary: str
    extra: str
    function: str = "main"


VERBS: dict[str, Verb] = {
    "status": Verb("rose_cli.ops.status", "show pools, leases and slots", "operator"),
    "explain": Verb("rose_cli.ops.explain", "say why replicas are lent or not", "operator"),
    "top": Verb("rose_cli.ops.top", "show who uses most", "operator"),
    "models": Verb("rose_cli.ops.models", "show which models lie on which nodes", "operator"),
    "report": Verb("rose_cli.ops.report", "add up GPU time, tokens and cost", "operator"),
    "pause": Verb("rose_cli.ops.pause", "take everything back from pools", "operator"),
    "resume": Verb(
        "rose_cli.ops.pause", "lend again, as before the pause", "operator", function="resume"
    ),
    "drain": Verb("rose_cli.ops.drain", "free a node's GPUs of rollouts", "operator"),
    "caller": Verb("rose_cli.ops.caller", "say who outside may call a lease's router", "operator"),
    "operator": Verb("rose_operator.main", "reconcile pools and leases into slots", "operator"),
    "agent": Verb("rose_agent.guard.main", "guard the serving replicas of this node", "agent"),
    "sleeper": Verb("rose_agent.sleeper.sleepers", "wake serving engines of this node", "agent"),
    "tap": Verb("rose_agent.tap.main", "watch serving traffic of this node", "agent"),
    "engine-host": Verb(
        "rose_agent.host.privilege_split", "run rollout engines on this node", "agent"
    ),
    "vacate": Verb(
        "rose_agent.host.vacancy.vacate", "wait until no rollout engine holds the GPUs", "agent"
    ),
    "mps": Verb("rose_agent.devices.mps.main", "run the MPS daemon of a node", "agent"),
    "weight-sync": Verb("rose_agent.weightsync.main", "bring weights to this node", "weights"),
    "sandbox-host": Verb("rose_sandbox.main", "run agents' sandboxes on this node", "sandbox"),
    "router": Verb("rose_router.main", "serve a lease's URL to trainers", "router"),
    "weights": Verb("rose_weights.main", "serve, inspect, verify and compare weights", "weights"),
    "tenant": Verb(
        "rose_weights.serve.tenant_verbs", "say who may publish and read runs", "weights"
    ),
    "ingest": Verb(
        "rose_trainer.adapters.ingest", "publish checkpoints that a trainer writes", "trainer"
    ),
    "forward": Verb(
        "rose_trainer.adapters.forward", "give a token to a trainer that sends none", "trainer"
    ),
    "rewards": Verb("rose_rewards.main", "compute rewards of trajectories that end", "rewards"),
    "reward-worker": Verb("rose_rewards.remote", "verify what a gateway gives to it", "rewards"),
    "batches": Verb("rose_batches.main", "run batch files on a lease's engines", "batches"),
    "simulate": Verb(
        "rose_simulate.main", "try policies on recorded load, on virtual time", "simulate"
    ),
    "cost": Verb("rose_simulate.verbs.cost", "say what an accepted trajectory cost", "simulate"),
    "advise": Verb(
        "rose_simulate.verbs.advise", "say what a pool could lend, from its load", "simulate"
    ),
    "dev": Verb("rose_dev.main", "one-node Kubernetes for development", "dev"),
    "demo": Verb("rose_demo.main", "the main job on real parts, with a report", "dev"),
}


# A second word with a module of its own; the library ``rose_weights`` knows no shell.
SUBVERBS: dict[tuple[str, str], Verb] = {
    ("advise", "memory"): Verb(
        "rose_simulate.verbs.advise_memory",
        "say what serving's memory setting would lend",
        "simulate",
    ),
    ("router", "token"): Verb(
        "rose_cli.ops.router_token", "say what an engine of one's own shows to a router", "operator"
    ),
    ("weights", "commits"): Verb(
        "rose_agent.weightsync.records", "say what each commit carried and took", "agent"
    ),
}


# Packages that the wheel leaves out: they build from the checkout, and no image should hold them.
_CHECKOUT_ONLY = {"rose_dev", "rose_demo"}

# Under which heading ``rose --help`` shows a verb, by the first verb below it.
_HEADINGS = {
    "status": "for people, on a cluster (also as kubectl rose VERB)",
    "operator": "processes",
    "weights": "weights, beside the trainer",
    "simulate": "planning and cost",
    "dev": "development, in a checkout",
}


def usage() -> str:
    """The text of ``rose --help``."""
    width = max(map(len, VERBS))
    lines = []
    for name, verb in VERBS.items():
        lines += [f"\n{_HEADINGS[name]}:"] if name in _HEADINGS else []
        lines.append(f"  {name:<{width}}  {verb.summary}")
    lines.append("\nrose VERB --help has the arguments of a verb.")
    return "usage: rose VERB [ARGUMENTS]\n" + "\n".join(lines) + "\n"


def _load(name: str, verb: Verb) -> Callable[[list[str]], int]:
    try:
        module = importlib.import_module(verb.module)
    except ModuleNotFoundError as error:
        if error.name in _CHECKOUT_ONLY:
            message = (
                f"rose {name}: needs a checkout of ROSE, what is installed here leaves it out; "
                f"in one: make venv && .venv/bin/rose {name}"
            )
            raise SystemExit(message) from error
        if error.name is None or error.name.split(".")[0].startswith("rose_"):
            raise
        message = (
            f"rose {name}: the Python package {error.name!r} is missing; "
            f"install rose-gpu[{verb.extra}]"
        )
        raise SystemExit(message) from error
    run: Callable[[list[str]], int] = getattr(module, verb.function)
    return run


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The process's exit code: 0 done, 1 failed, 2 wrong usage.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help"}:
        sys.stdout.write(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    verb = VERBS.get(name)
    if verb is None:
        near = get_close_matches(name, VERBS, 1)
        hint = f"; did you mean {near[0]!r}? rose --help lists all\n" if near else f"\n\n{usage()}"
        sys.stderr.write(f"rose: no verb {name!r}{hint}")
        return 2
    if os.getpid() == _FIRST:
        # The kernel lets a container's first process pass over what it does not handle: a pod that
        # goes while it still imports would last for all of its grace.
        signal.signal(signal.SIGTERM, _leave)
    return _run(name, verb, rest)


def _leave(number: int, _frame: object) -> None:
    """Nothing was begun: verbs that have something to end take the signal themselves."""
    os._exit(128 + number)


def _run(name: str, verb: Verb, rest: list[str]) -> int:
    found = SUBVERBS.get((name, rest[0])) if rest else None
    try:
        if found is not None:
            return _load(name, found)(rest[1:])
        return _load(name, verb)(rest)
    except BrokenPipeError:  # as in `rose status | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file, a port, an address: for people, no trace
        sys.stderr.write(f"rose {name}: {complaint(error, rest)}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
