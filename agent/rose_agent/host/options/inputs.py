"""What was given to ``rose engine-host`` is looked at before anything is touched.

A wrong flag or file ends the verb with code 2 and one line; a host that starts anyway would find it
only once an engine is ordered. Checked twice: as root before the helper is started, and as the
host's own user, who may not read what root can.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rose_agent.errors import BadInput
from rose_agent.host.options.arguments import check_users
from rose_agent.host.options.dedicated_file import DedicatedFile
from rose_agent.host.users import kv_folders
from rose_wire import flags

# Mooncake's clients are known by IPv4 addresses.
_MASTER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?:[0-9]{1,5}")


def problem(arguments: argparse.Namespace, argv: Sequence[str]) -> str:
    """What is wrong with what was given, in a line; empty when nothing is."""
    try:
        check(arguments)
    except (BadInput, OSError) as error:
        return flags.complaint(error, argv)
    return ""


def check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work.

    Raises:
        BadInput: a flag, or what it names, is wrong; says which and what to do.
        OSError: a file cannot be read.
    """
    check_users(arguments)
    if arguments.rundir.exists() and not arguments.rundir.is_dir():
        raise BadInput(f"--rundir {arguments.rundir} is no folder; name one, on a tmpfs")
    if arguments.thaw_all:
        return
    _check_models(arguments.models)
    room, shm = arguments.kv_store_mib << 20, arguments.engine_shm_mib << 20
    kv_folders.check(arguments.kv_store, room, shm)
    _check_pool(arguments)
    if shutil.which(str(arguments.engine_python)) is None:
        raise BadInput(
            f"--engine-python {arguments.engine_python} cannot be run; name a Python that has the "
            "engine installed"
        )
    flags.token(arguments.token_file)
    _check_dedicated(arguments)


def _check_pool(arguments: argparse.Namespace) -> None:
    if not arguments.kv_pool:
        return
    if arguments.kv_store is None:
        raise BadInput(
            "--kv-pool needs --kv-store and --kv-store-mib: pages of other nodes come into the "
            "lease's folder on this one"
        )
    if _MASTER.fullmatch(arguments.kv_pool) is None:
        raise BadInput(
            f"--kv-pool {arguments.kv_pool} is no HOST:PORT; name Mooncake's master by a name or "
            "an IPv4 address, without a scheme"
        )
    python = arguments.kv_pool_python
    if python and shutil.which(python) is None:
        raise BadInput(
            f"--kv-pool-python {python} cannot be run; name a Python that has Mooncake installed"
        )


def _check_models(folder: Path | None) -> None:
    if folder is None:
        raise BadInput("--models is needed: the folder with one folder per model")
    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "does not exist"
        raise BadInput(f"--models {folder} {problem}; make it, with one folder per model in it")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise BadInput(
            f"--models {folder} cannot be read by user {os.geteuid()}; every user must be able to "
            "(chmod 755)"
        )


def _check_dedicated(arguments: argparse.Namespace) -> None:
    if arguments.dedicated is None:
        return
    if not arguments.router or not arguments.lease:
        raise BadInput("--dedicated needs --router HOST:PORT and --lease NAMESPACE/NAME")
    try:
        flags.target(arguments.router)
    except argparse.ArgumentTypeError as error:
        raise BadInput(f"--router: {error}") from error
    if [bool(part) for part in arguments.lease.split("/")] != [True, True]:
        raise BadInput(f"--lease {arguments.lease!r} is no lease; expected NAMESPACE/NAME")
    DedicatedFile.load(arguments.dedicated)
