"""``rose caller grant|revoke|list``: who outside the cluster may call a lease's router.

Inside, service accounts of the lease's namespace call with tokens of their own. A trainer elsewhere
gets a credential: this makes one, prints it once, and writes its hash into
``spec.router.callers`` of the lease. No rights are needed but those to change the lease.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import os
import secrets
import sys
from pathlib import Path

import yaml

from rose_cli.ops.cluster import Cluster, connection_flags, run
from rose_cli.ops.errors import CommandError, NotFound
from rose_cli.ops.tables import Row, table
from rose_core.api import RolloutLease
from rose_wire.flags import VerbParser, lifetime

_SECRET_BYTES = 32


def main(argv: list[str]) -> int:
    """Run one sub-verb."""
    given = _parser().parse_args(argv)
    if given.verb == "grant" and given.print:
        try:
            secret, entry = _made(given)
            _hand_over(given, secret)
        except OSError as error:
            sys.stderr.write(f"rose caller grant: {given.out}: {error.strerror}\n")
            return 1
        sys.stdout.write(yaml.safe_dump([entry], sort_keys=False))
        return 0
    bodies = {"grant": _grant, "revoke": _revoke, "list": _list}
    return run(f"caller {given.verb}", given, lambda cluster: bodies[given.verb](cluster, given))


def _parser() -> argparse.ArgumentParser:
    top = VerbParser("rose caller", description=__doc__.splitlines()[0])
    verbs = top.add_subparsers(dest="verb", required=True)
    shared = connection_flags()
    grant = verbs.add_parser("grant", parents=[shared], help="make a credential for a caller")
    revoke = verbs.add_parser("revoke", parents=[shared], help="end a caller's credential")
    listing = verbs.add_parser("list", parents=[shared], help="show the lease's callers")
    for verb in (grant, revoke):
        verb.add_argument("name", help="of the caller, as it appears in the router's log")
    for verb in (grant, revoke, listing):
        verb.add_argument("--lease", required=True, help="the lease's name")
    grant.add_argument("--turns-only", action="store_true", help="no pauses, pushes or reports")
    grant.add_argument(
        "--expires", type=lifetime, default=dt.timedelta(days=90), metavar="90d",
        help="90d (the default), 12h, 30m or never",
    )  # fmt: skip
    grant.add_argument("--out", type=Path, help="write the credential there (mode 0600)")
    grant.add_argument(
        "--print", action="store_true",
        help="print the entry for spec.router.callers instead of changing the lease; needs --out",
    )  # fmt: skip
    return top


def _made(given: argparse.Namespace) -> tuple[str, dict[str, object]]:
    secret = f"rose_{given.name}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    entry: dict[str, object] = {
        "name": given.name,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
    }
    if given.turns_only:
        entry["turnsOnly"] = True
    if given.expires is not None:
        until = dt.datetime.now(dt.UTC).replace(microsecond=0) + given.expires
        entry["expires"] = until.isoformat().replace("+00:00", "Z")
    return secret, entry


def _hand_over(given: argparse.Namespace, secret: str) -> None:
    """The credential, to its file or the terminal; before anything is granted, lest it be lost.

    Raises:
        OSError: the file is there already, or cannot be written.
    """
    if given.out is None:
        stream = sys.stderr if given.print else sys.stdout
        stream.write(secret + "\n")
        return
    descriptor = os.open(given.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")


def _grant(cluster: Cluster, given: argparse.Namespace) -> int:
    lease = cluster.get(RolloutLease, given.lease)
    if given.name in {one.name for one in lease.spec.router.callers}:
        message = (
            f"lease {lease.metadata.key} has a caller {given.name!r} already; revoke it, or grant "
            "under another name and revoke the old one when the trainer has moved"
        )
        raise CommandError(message)
    secret, entry = _made(given)
    try:
        _hand_over(given, secret)
    except OSError as error:
        raise CommandError(f"{given.out}: {error.strerror}") from error
    _write(cluster, lease, [*_entries(lease), entry])
    where = f"; its credential is in {given.out}" if given.out else ""
    sys.stderr.write(f"{given.name} may call the router of {lease.metadata.key}{where}\n")
    return 0


def _revoke(cluster: Cluster, given: argparse.Namespace) -> int:
    lease = cluster.get(RolloutLease, given.lease)
    kept = [one for one in _entries(lease) if one["name"] != given.name]
    if len(kept) == len(lease.spec.router.callers):
        known = ", ".join(one.name for one in lease.spec.router.callers) or "none"
        message = f"lease {lease.metadata.key} has no caller {given.name!r}; it has: {known}"
        raise NotFound(message)
    _write(cluster, lease, kept)
    sys.stdout.write(f"{given.name} calls the router of {lease.metadata.key} no more\n")
    return 0


def _list(cluster: Cluster, given: argparse.Namespace) -> int:
    lease = cluster.get(RolloutLease, given.lease)
    rows: list[Row] = [
        {
            "caller": one.name,
            "may": "turns" if one.turns_only else "everything",
            "expires": one.expires or "never",
        }
        for one in lease.spec.router.callers
    ]
    accounts = f"service accounts of {lease.metadata.namespace}, with tokens of their own"
    sys.stdout.write(table(rows) if rows else f"no callers but {accounts}\n")
    return 0


def _entries(lease: RolloutLease) -> list[dict[str, object]]:
    return [
        one.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        for one in lease.spec.router.callers
    ]


def _write(cluster: Cluster, lease: RolloutLease, callers: list[dict[str, object]]) -> None:
    """Only what we have read is replaced: somebody else's change meanwhile is a conflict."""
    version = {"resourceVersion": lease.metadata.resource_version}
    spec = {"router": {"callers": callers}}
    cluster.patch(RolloutLease, lease.metadata.name, {"metadata": version, "spec": spec})
