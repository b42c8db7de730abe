"""``rose router token``: what is shown to a lease's router, or by it.

Agents get it with their grants. The host of a dedicated engine lives elsewhere, so the platform
makes it, from the installation's token, and hands it to the team: it opens the router of that lease
and nothing else, and tells nothing of the installation's. With ``--for batches`` or ``--for
ingest`` it is what the router shows to that process of its lease, which then hears it alone: ``rose
batches --token-file``, ``rose ingest --caller-token-file``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose_wire import flags
from rose_wire.bearer import BATCHES, INGEST, lease_token, service_token
from rose_wire.flags import VerbParser


def _lease(text: str) -> str:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is no lease; expected NAMESPACE/NAME")
    return text


def main(argv: list[str]) -> int:
    """Print the token.

    Returns:
        0 printed, 1 the installation's token cannot be read.
    """
    parser = VerbParser("rose router token", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lease",
        type=_lease,
        required=True,
        metavar="NAMESPACE/NAME",
        help="the lease whose router it is",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        required=True,
        help="the installation's token (key `token` of the Secret rose-token)",
    )
    parser.add_argument(
        "--for",
        dest="service",
        choices=[BATCHES, INGEST],
        help="what the lease's router shows to that service: `rose batches --token-file`, "
        "`rose ingest --caller-token-file`",
    )
    given = parser.parse_args(argv)
    try:
        token = flags.token(given.token_file)
        if given.service:
            made = service_token(token, given.lease, given.service)
        else:
            made = lease_token(token, given.lease)
        sys.stdout.write(made + "\n")
    except OSError as error:
        sys.stderr.write(f"rose router token: {flags.complaint(error, argv)}\n")
        return 1
    return 0
