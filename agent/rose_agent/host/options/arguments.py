"""The words of ``rose engine-host``: read by the host and by its root helper.

Imports nothing that talks to anybody: the helper (``helper``) stays as small as that.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from rose_agent.devices.mps.control import PROGRAM
from rose_agent.errors import BadInput, NoLimits
from rose_agent.host.route.data_certificate import RENEWED_SECONDS
from rose_agent.host.users.accounts import COUNT
from rose_agent.host.users.kv_folders import KvFolders
from rose_agent.os.limits import LEAST_BUSY_PERCENT, PROCESSES, Limiter, Limits
from rose_core.rollouts.engines.kv_store import KvPoolSpec
from rose_wire import flags, tls
from rose_wire.flags import VerbParser

_log = logging.getLogger(__name__)
# The last number is no user: the kernel reads it as "unchanged".
_LAST_USER = 2**32 - 2
_ABOUT = """Run rollout engines on this node.

On SIGTERM: nothing new is started, requests in flight may end within --drain-seconds, then every
tree is killed, which thaws it where that is needed. --thaw-all is for a preStop hook.
"""


def engine_python(prefix: Path = Path(sys.prefix)) -> Path:
    """What the engine image runs engines with; our own Python where there is no such image."""
    named = prefix / "engine-python"
    return named if named.exists() else Path(sys.executable)


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = VerbParser(prog="rose engine-host", description=_ABOUT)
    made.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node"
    )
    made.add_argument("--models", type=Path, help="folder with the node's models")
    made.add_argument(
        "--engine-python",
        type=Path,
        default=engine_python(),
        help="Python with the engine's packages; by default the engine image's own",
    )
    made.add_argument("--data-host", default="127.0.0.1", help="address routers can reach")
    made.add_argument("--data-bind", default="", help="address to listen on (default: data-host)")
    made.add_argument("--data-port", type=flags.port, default=30800, help="0 = any")
    made.add_argument(
        "--http-port", type=flags.port, default=9103, help="metrics and health; 0 = any"
    )
    made.add_argument(
        "--cgroup",
        choices=["auto", "v1", "v2", "signals"],
        default="auto",
        help="how engines are stopped; auto = the first that works here",
    )
    made.add_argument(
        "--devices",
        choices=["static", "nvml"],
        default="static",
        help="where engines hold their memory: nvml = on GPUs, static = in host memory",
    )
    made.add_argument(
        "--engine-uid",
        type=flags.count,
        default=0,
        help="first of the users engines get; 0 = the host's",
    )
    made.add_argument(
        "--host-uid",
        type=flags.count,
        default=0,
        help="user of this host, root a helper; 0 = in one",
    )
    made.add_argument(
        "--engine-memory-mib", type=flags.count, default=0, help="per engine; 0 = no limit"
    )
    made.add_argument(
        "--engine-pids",
        type=flags.count,
        help=f"processes and threads per engine; 0 = any, {PROCESSES} where that can be limited",
    )
    made.add_argument(
        "--engine-cpu-percent", type=flags.count, default=0, help="of one core; 0 = any"
    )
    made.add_argument(
        "--engine-busy-cpu-percent",
        type=flags.count,
        default=0,
        help="of one core, for MPS clients while serving is busy; 0 = as always",
    )
    made.add_argument(
        "--engine-shm-mib", type=flags.count, default=0, help="own /dev/shm; 0 = shared"
    )
    made.add_argument(
        "--kv-store", type=Path, help="tmpfs for the keys that engines of a lease share"
    )
    made.add_argument(
        "--kv-store-mib", type=flags.count, default=0, help="of all leases' keys; 0 = none"
    )
    made.add_argument(
        "--kv-pool",
        default="",
        metavar="HOST:PORT",
        help="master of the platform's Mooncake store, in which leases' keys are there for other "
        "nodes; sealed with a secret of the lease",
    )
    made.add_argument(
        "--kv-pool-protocol",
        choices=["tcp", "rdma"],
        default="tcp",
        help="how pages come from there; rdma has not been tried",
    )
    made.add_argument(
        "--kv-pool-python", default="", help="Python that has Mooncake; the engines' by default"
    )
    made.add_argument(
        "--data-tls",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="data routes answer with a certificate that routers are told of; by default where "
        "--router is tls://, over which the router hears of it",
    )
    made.add_argument(
        "--data-tls-seconds",
        type=flags.above_zero,
        default=RENEWED_SECONDS,
        help="how long such a certificate is shown before its successor is told of",
    )
    made.add_argument("--mps-root", type=Path, help="folder of the MPS daemon")
    made.add_argument("--mps-program", default=PROGRAM, help="the MPS control program")
    made.add_argument(
        "--drain-seconds",
        type=flags.amount,
        default=5.0,
        help="in which turns in flight may end before the engines do",
    )
    made.add_argument("--thaw-all", action="store_true", help="let every engine go on, then exit")
    made.add_argument("--dedicated", type=Path, metavar="FILE", help="run one engine by itself")
    made.add_argument("--router", default="", metavar="HOST:PORT", help="with --dedicated")
    made.add_argument("--lease", default="", metavar="NS/NAME", help="with --dedicated")
    made.add_argument("--token-file", type=Path, help="the install's bearer token")
    flags.add_log_level(made)
    return made


def encrypts(arguments: argparse.Namespace) -> bool:
    """Whether turns come by a certificate; a router that is dialled in the open hears of none."""
    if arguments.data_tls is None:
        return bool(arguments.router.startswith(tls.SCHEME))
    return bool(arguments.data_tls)


def check_users(arguments: argparse.Namespace) -> None:
    """Refuse users that do not go together.

    Raises:
        BadInput: says which.
    """
    first, host = arguments.engine_uid, arguments.host_uid
    # After the users come the groups of leases that share keys.
    names = 2 * COUNT if arguments.kv_store is not None else COUNT
    for flag, last in (("--engine-uid", first + names - 1), ("--host-uid", host)):
        if last > _LAST_USER:
            raise BadInput(f"{flag}: there is no user {last}; the last is {_LAST_USER}")
    if not host:
        return
    if not first:
        raise BadInput(
            f"--host-uid {host} needs --engine-uid: engines must be other users than their host"
        )
    if arguments.mps_root is not None:
        raise BadInput(
            "--host-uid cannot be together with --mps-root: MPS clients are ended by root; leave "
            "one of them out"
        )
    if host in range(first, first + names):
        raise BadInput(
            f"--host-uid {host} is one of the engines' users, {first} to {first + names - 1}; "
            "choose one outside"
        )
    if not arguments.engine_python.is_absolute():
        raise BadInput(
            f"--engine-python {arguments.engine_python} is no absolute path, which --host-uid needs"
        )


def kv_folders_of(arguments: argparse.Namespace) -> KvFolders:
    """Where engines of a lease keep keys for each other."""
    return KvFolders(
        arguments.kv_store,
        arguments.kv_store_mib << 20,
        arguments.engine_uid,
        arguments.engine_memory_mib << 20,
    )


def kv_pool_of(arguments: argparse.Namespace) -> KvPoolSpec | None:
    """Where leases' keys are there for other nodes; None = nowhere."""
    if not arguments.kv_pool:
        return None
    return KvPoolSpec(
        arguments.kv_pool,
        arguments.kv_pool_protocol,
        arguments.kv_pool_python or str(arguments.engine_python),
    )


def limits_of(arguments: argparse.Namespace) -> Limits:
    """What engines may take."""
    return Limits(
        memory_bytes=arguments.engine_memory_mib << 20,
        pids=arguments.engine_pids or 0,
        cpu_percent=arguments.engine_cpu_percent,
        busy_cpu_percent=max(arguments.engine_busy_cpu_percent, LEAST_BUSY_PERCENT)
        if arguments.engine_busy_cpu_percent
        else 0,
        shm_bytes=arguments.engine_shm_mib << 20,
    )


def limiter_of(arguments: argparse.Namespace, prefix: str) -> Limiter:
    """The limits that were asked for, and one on processes wherever that is possible.

    Raises:
        NoLimits: one that was asked for cannot be set.
    """
    limits = limits_of(arguments)
    if arguments.engine_pids is None:
        try:
            return Limiter.detect(replace(limits, pids=PROCESSES), prefix)
        except NoLimits as error:
            _log.warning("a fork bomb in an engine would not be contained: %s", error)
    return Limiter.detect(limits, prefix)
