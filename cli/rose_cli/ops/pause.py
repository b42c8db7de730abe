"""``rose pause`` and ``rose resume``: take everything back from pools, and lend again.

``pause`` remembers the mode in an annotation, so that ``resume`` goes back to it: an observing pool
does not begin to lend because somebody has paused it in between.
"""

from __future__ import annotations

import argparse
import sys

from rose_cli.ops.cluster import Cluster, connection_flags, run, until
from rose_cli.ops.errors import CommandError
from rose_core.api import RESUME_ANNOTATION, PoolMode, RolloutSlot, ServingPool
from rose_wire.flags import VerbParser, amount


def main(argv: list[str]) -> int:
    """Set mode Paused, and wait until nothing is lent any more."""
    given = _given("pause", "take everything back from pools", argv)
    return run("pause", given, lambda cluster: _pause(cluster, given))


def resume(argv: list[str]) -> int:
    """Go back to the mode before ``pause``."""
    given = _given("resume", "lend again, as before the pause", argv)
    return run("resume", given, lambda cluster: _resume(cluster, given))


def _given(name: str, text: str, argv: list[str]) -> argparse.Namespace:
    parser = VerbParser(f"rose {name}", description=text, parents=[connection_flags()])
    parser.add_argument("pools", nargs="*", metavar="POOL", help="names of pools")
    parser.add_argument("--all", action="store_true", help="every pool of the namespace")
    if name == "pause":
        parser.add_argument("--no-wait", action="store_true", help="do not wait for the GPUs")
        parser.add_argument("--timeout", type=amount, default=120.0, help="seconds to wait")
    given = parser.parse_args(argv)
    if bool(given.pools) == given.all:
        parser.error("name pools, or give --all")
    return given


def _chosen(cluster: Cluster, given: argparse.Namespace) -> list[ServingPool]:
    if given.all:
        if cluster.namespace is None:
            raise CommandError("-A would change pools of every owner; give --namespace")
        return cluster.objects(ServingPool)
    return [cluster.get(ServingPool, name) for name in given.pools]


def _pause(cluster: Cluster, given: argparse.Namespace) -> int:
    pools = _chosen(cluster, given)
    for pool in pools:
        if pool.spec.mode is PoolMode.PAUSED:
            _print(f"{pool.metadata.key} is paused already")
            continue
        before = {"metadata": {"annotations": {RESUME_ANNOTATION: pool.spec.mode.value}}}
        cluster.patch(
            ServingPool, pool.metadata.name, before | {"spec": {"mode": PoolMode.PAUSED.value}}
        )
        _print(f"{pool.metadata.key} paused; it was in mode {pool.spec.mode.value}")
    if not given.no_wait:
        _wait(cluster, pools, given.timeout)
    return 0


def _wait(cluster: Cluster, pools: list[ServingPool], seconds: float) -> None:
    keys = {pool.metadata.key for pool in pools}

    def vacated() -> bool:
        slots = cluster.objects(RolloutSlot, everywhere=True)
        return not any(slot.spec.pool_ref.key in keys for slot in slots)

    until(
        vacated,
        seconds,
        f"slots are left after {seconds:.0f} s: kubectl get rolloutslots -A; the guard protects "
        "serving meanwhile, and `rose agent stop` on a node ends its engines at once",
    )
    _print("nothing is lent any more")


def _resume(cluster: Cluster, given: argparse.Namespace) -> int:
    for pool in _chosen(cluster, given):
        if pool.spec.mode is not PoolMode.PAUSED:
            _print(f"{pool.metadata.key} is not paused: mode {pool.spec.mode.value}")
            continue
        mode = pool.metadata.annotations.get(RESUME_ANNOTATION, "")
        if mode not in {PoolMode.LEND.value, PoolMode.OBSERVE.value}:
            message = (
                f"{pool.metadata.key} was not paused by `rose pause`, so its mode before is not "
                "known; set spec.mode yourself"
            )
            raise CommandError(message)
        forget = {"metadata": {"annotations": {RESUME_ANNOTATION: None}}}
        cluster.patch(ServingPool, pool.metadata.name, forget | {"spec": {"mode": mode}})
        _print(f"{pool.metadata.key} resumed in mode {mode}")
    return 0


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
