"""``rose tap``: watch serving traffic of this node.

Two processes from the start. The *opener* keeps the capabilities (NET_RAW, and SYS_ADMIN with
SYS_PTRACE to enter other pods) and reads no packet. The *parser*, forked from it, gives up every
capability and the network itself before the first packet: it keeps only the sockets it is handed,
``tap.sock`` and its metrics port. Neither can start a program or make a socket that reaches the
network (``seccomp``), neither leaves a core dump. If one ends, so does the other.

The opener waits nearly always, so it stays small: what only the parser needs is imported after the
fork, and before the parser is confined. Next step: ``parser``, ``opener``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from rose_agent.os import bpf_maps, kernel, seccomp
from rose_agent.tap import opener
from rose_wire import flags
from rose_wire.flags import VerbParser

_log = logging.getLogger("rose.tap")
_SAMPLE_FROM = 400.0  # segments per second


def arguments() -> argparse.ArgumentParser:
    """The verb's flags."""
    parser = VerbParser(prog="rose tap", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node"
    )
    parser.add_argument("--http-host", default="0.0.0.0", help="address of /metrics and /healthz")  # noqa: S104  # scraped by Prometheus
    parser.add_argument("--http-port", type=flags.port, default=9102, help="0 = any")
    parser.add_argument(
        "--sample-from",
        type=flags.amount,
        default=_SAMPLE_FROM,
        metavar="N",
        help="segments per second above which token streams are sampled in the kernel; 0 = never",
    )
    parser.add_argument(
        "--tokens",
        choices=("kernel", "packets"),
        default="kernel",
        help="who counts them: a program in the kernel where it can be loaded, or packet by packet",
    )
    parser.add_argument(
        "--sidecar",
        action="store_true",
        help="run inside a serving pod with NET_RAW only; --rundir is the pod's folder under taps/",
    )
    flags.add_log_level(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the tap until a signal.

    Returns:
        Exit code: 0 ended as asked, 1 failed.
    """
    options = arguments().parse_args(argv)
    logging.basicConfig(level=options.log_level, format="%(levelname)s %(name)s %(message)s")
    try:
        options.rundir.mkdir(mode=0o700, parents=True, exist_ok=True)
        http = socket.create_server((options.http_host, options.http_port))
        listener = listen(options.rundir / "tap.sock")
    except OSError as error:
        _log.error("%s", flags.complaint(error, argv))  # for people, no trace
        return 1
    own_end, parser_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        own_end.close()
        os._exit(_parse(options, parser_end, listener, http))
    for unused in (parser_end, listener, http):
        unused.close()
    return _open(own_end, child, own=options.sidecar, count=options.tokens == "kernel")


def _open(channel: socket.socket, child: int, *, own: bool, count: bool) -> int:
    def end(_number: int, _frame: object) -> None:
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    opener.confine(own=own)
    with contextlib.suppress(ConnectionError):
        opener.serve(channel, own=own, count=count)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return 0 if code in {0, -signal.SIGTERM} else 1


def _parse(
    options: argparse.Namespace,
    channel: socket.socket,
    listener: socket.socket,
    http: socket.socket,
) -> int:
    try:
        kernel.die_with_parent(signal.SIGTERM)
        from rose_agent.tap import parser  # noqa: PLC0415  # the opener does without it

        kernel.forbid_dumps()
        kernel.overwrite_freed()
        try:
            kernel.leave_network()
        except OSError as error:
            # As in a pod: ``seccomp`` still lets it make no socket that reaches anything.
            _log.info("the parser keeps its network: %s", error)
        kernel.keep_capabilities()
        seccomp.confine(seccomp.PARSER, bpf_maps.COMMANDS)
        parser.run_parser(channel, options.rundir, options.sample_from, listener, http)
    except Exception:  # noqa: BLE001  # a forked child must end here, with a word
        _log.exception("the tap's parser failed")
        return 1
    return 0


def listen(path: Path) -> socket.socket:
    """Open the Unix socket, replacing a leftover; only our user may connect."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(4)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
