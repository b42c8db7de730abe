"""``rose tenant grant|revoke|list``: who may publish and read which runs of a store.

It changes a file that every store with ``--tenants FILE`` reads again by itself. Next step:
``tenants`` is the file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from rose_weights.errors import WeightsError
from rose_weights.serve import tenants
from rose_wire import flags
from rose_wire.flags import VerbParser


def _pattern(text: str) -> str:
    if not re.fullmatch(r"[-\w.*?\[\]!/:@]{1,253}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name or shell pattern")
    return text


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    top = VerbParser(prog="rose tenant", description=__doc__.splitlines()[0])
    verbs = top.add_subparsers(dest="verb", required=True)
    grant = verbs.add_parser("grant", help="add rights to a tenant and print a new credential")
    grant.add_argument("name", help="of the tenant: a team, a trainer, a serving cluster")
    for right, what in (
        ("publish", "it may publish"),
        ("read", "it may read"),
        ("record", "whose sandboxes' records it may keep and read"),
    ):
        grant.add_argument(
            f"--{right}",
            type=_pattern,
            action="append",
            default=[],
            metavar="RUN",
            help=f"runs {what}, as a shell pattern; repeatable",
        )
    grant.add_argument(
        "--certificate",
        type=_pattern,
        action="append",
        default=[],
        metavar="NAME",
        help="a name in certificates that is this tenant, as a shell pattern; repeatable",
    )
    grant.add_argument(
        "--service-account",
        type=_pattern,
        action="append",
        default=[],
        metavar="NAMESPACE/NAME",
        help="a service account that is this tenant, as a shell pattern; repeatable",
    )
    grant.add_argument(
        "--expires", type=flags.lifetime, default=None, metavar="90d", help="default: until revoked"
    )
    grant.add_argument("--out", type=Path, help="write the credential there (mode 0600)")
    grant.add_argument("--no-credential", action="store_true", help="rights alone")
    revoke = verbs.add_parser("revoke", help="end a tenant, or one credential of it")
    revoke.add_argument("name", help="of the tenant")
    revoke.add_argument("--credential", default="", metavar="ID", help="only this one")
    listing = verbs.add_parser("list", help="show tenants, rights and credentials")
    for verb in (grant, revoke, listing):
        verb.add_argument(
            "--tenants",
            type=Path,
            required=True,
            metavar="FILE",
            help="file of tenants, as rose weights serve reads it; made where it is not there",
        )
    return top


def main(argv: list[str]) -> int:
    """Run one sub-verb.

    Returns:
        0 done, 1 the file does not allow it.
    """
    given = parser().parse_args(argv)
    try:
        if given.verb == "grant":
            return _grant(given)
        if given.verb == "revoke":
            ended = tenants.revoke(given.tenants, given.name, given.credential)
            what = f"credential {given.credential} of" if given.credential else "tenant"
            sys.stdout.write(f"revoked {what} {given.name}: {ended} credentials have ended\n")
            return 0
        sys.stdout.write(_listing(tenants.load(given.tenants)) + "\n")
    except (WeightsError, OSError) as error:
        sys.stderr.write(f"rose tenant {given.verb}: {flags.complaint(error, argv)}\n")
        return 1
    return 0


def _grant(given: argparse.Namespace) -> int:
    descriptor = -1
    if given.out is not None and not given.no_credential:
        # Before anything is granted: a credential that cannot be written would be lost.
        descriptor = os.open(given.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    credential = tenants.grant(
        given.tenants,
        given.name,
        publish=tuple(given.publish),
        read=tuple(given.read),
        record=tuple(given.record),
        certificates=tuple(given.certificate),
        service_accounts=tuple(given.service_account),
        lifetime=given.expires,
        issue=not given.no_credential,
    )
    if descriptor >= 0:
        with os.fdopen(descriptor, "w") as file:
            file.write(credential + "\n")
        sys.stderr.write(f"granted {_may(given)}; its credential is in {given.out}\n")
    elif credential:
        sys.stdout.write(credential + "\n")
        sys.stderr.write(f"granted {_may(given)}; its credential is above, and nowhere else\n")
    return 0


def _may(given: argparse.Namespace) -> str:
    """A tenant and what it may do by now, so that a right that was forgotten is seen at once."""
    now = tenants.load(given.tenants).tenants[given.name]
    rights = {"publish": now.publish, "read": now.read, "record": now.record}
    said = [f"{right} {' '.join(runs)}" for right, runs in rights.items() if runs]
    nothing = "may do nothing yet (--publish, --read and --record name runs)"
    return f"{given.name}, which {'may ' + ', '.join(said) if said else nothing}"


def _listing(file: tenants.TenantsFile) -> str:
    rows: list[tuple[str, ...]] = [
        ("TENANT", "PUBLISHES", "READS", "RECORDS", "PROVES ITSELF BY", "EXPIRES")
    ]
    for name, one in sorted(file.tenants.items()):
        proofs = [(f"credential {made.id}", made.expires) for made in one.credentials]
        proofs += [(f"certificate {each}", None) for each in one.certificates]
        proofs += [(f"service account {each}", None) for each in one.service_accounts]
        for number, (proof, expires) in enumerate(proofs or [("nothing", None)]):
            runs = (one.publish, one.read, one.record)
            first = (name, *(" ".join(patterns) or "-" for patterns in runs))
            shown = first if number == 0 else ("",) * len(first)
            rows.append((*shown, proof, f"{expires:%Y-%m-%d %H:%M}Z" if expires else "never"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
