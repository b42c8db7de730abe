"""``rose dev``: a Kubernetes of one or two real nodes for development and tests.

``build`` makes its parts, ``up`` and ``down`` start and end it, ``status`` shows it, ``kubectl``
speaks to it, ``load`` brings images into it. Without root on Linux a cluster named by KUBECONFIG
takes its place. ``dashboards`` draws the dashboards of the chart from what a Prometheus holds.
See docs/development-cluster.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rose_dev import dashboards, prometheus
from rose_dev.cluster.build import build, fetch_kinds
from rose_dev.cluster.gpu_node.failures import ACTIONS, act
from rose_dev.cluster.gpu_node.starting import DRIVERS, ask_smi, state_of
from rose_dev.cluster.kwok import ANNOTATION
from rose_dev.cluster.node import Node, can_run_node
from rose_dev.cluster.node_packages import install_packages, missing_packages
from rose_dev.cluster.parts import CONTROL_PLANE, EVERYTHING, find
from rose_dev.dashboards.render import last, picture
from rose_dev.errors import DevelopmentError
from rose_dev.gpu.profiles import PROFILES
from rose_wire.flags import amount, count


def _log(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rose dev", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("build", help="build the parts of Kubernetes into the user's cache")
    make.add_argument(
        "--control-plane", action="store_true", help="only etcd, the API server and kubectl"
    )
    up = verbs.add_parser("up", help="start the node")
    up.add_argument(
        "--gpus",
        type=_gpus,
        metavar="MACHINE",
        help=f"{', '.join(PROFILES)}: GPUs behind NVIDIA's own programs; a number: claims",
    )
    up.add_argument(
        "--driver", type=int, choices=DRIVERS, default=DRIVERS[0], help="NVIDIA's, of a MACHINE"
    )
    failing = verbs.add_parser("gpu", help="let a GPU of a MACHINE fail, and be well again")
    failing.add_argument("action", choices=[*ACTIONS, "show"], help="what happens to the GPU")
    failing.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="WORD", help="which GPU, then a figure"
    )
    verbs.add_parser("second", help="start a second real node beside the running one")
    verbs.add_parser("down", help="end the node, or what is left of one")
    verbs.add_parser("status", help="show what runs")
    load = verbs.add_parser("load", help="import images into the node, from docker archives")
    load.add_argument(
        "archives", nargs="+", type=Path, metavar="ARCHIVE", help="of docker, with an image"
    )
    many = verbs.add_parser("nodes", help="stand nodes without machines (KWOK) beside the real one")
    many.add_argument("count", type=count, metavar="COUNT", help="nodes kwok-0, kwok-1, ...")
    boards = verbs.add_parser("dashboards", help="draw the dashboards as SVG from a Prometheus")
    boards.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    boards.add_argument("--minutes", type=amount, default=60.0, help="how far back")
    boards.add_argument("--out", type=Path, default=Path(), help="folder for NAME.svg")
    kubectl = verbs.add_parser("kubectl", help="run kubectl against the node")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER, help="of kubectl")
    return parser


def _gpus(text: str) -> int | str:
    """A machine's name, or a number."""
    return text if text in PROFILES else count(text)


def _existing_cluster() -> str:
    """Path in KUBECONFIG when it takes the node's place, else empty."""
    return "" if can_run_node() else os.environ.get("KUBECONFIG", "")


def _build(options: argparse.Namespace) -> int:
    build(CONTROL_PLANE if options.control_plane else EVERYTHING, _log)
    fetch_kinds(_log)
    if options.control_plane:
        return 0
    if can_run_node():
        install_packages(_log)
    try:
        prometheus.provide(_log)
    except DevelopmentError as error:  # tests of alerts and dashboards are skipped without it
        _log(f"[cluster] no prometheus: {error}")
    return 0


def _up(options: argparse.Namespace) -> int:
    if existing := _existing_cluster():
        _log(f"[cluster] no root on Linux: using the cluster of KUBECONFIG={existing}")
        return 0
    Node().up(gpus=options.gpus, driver=options.driver, log=_log)
    return 0


def _down(_options: argparse.Namespace) -> int:
    if existing := _existing_cluster():
        _log(f"[cluster] the cluster of KUBECONFIG={existing} is not ours; nothing to do")
        return 0
    Node().down(log=_log)
    return 0


def _status(_options: argparse.Namespace) -> int:
    """Exit code 0 when the node is ready, else 1."""
    missing = [part.name for part in EVERYTHING if find(part) is None]
    _log(f"parts not built: {', '.join(missing) or 'none'}")
    _log(f"packages missing: {', '.join(missing_packages()) or 'none'}")
    if existing := _existing_cluster():
        _log(f"cluster: KUBECONFIG={existing}")
        return 0
    node = Node()
    if not node.namespaces.alive():
        _log("node: absent (rose dev up)")
        return 1
    for name, runs in node.components().items():
        _log(f"{name:<24} {'running' if runs else 'DEAD'}")
    for name, runs in node.second().components().items():
        _log(f"second {name:<17} {'running' if runs else 'DEAD'}")
    ready = node.healthy()
    _log(f"node: {'ready' if ready else 'broken (rose dev down, rose dev up)'}")
    _log(f"KUBECONFIG={node.kubeconfig}")
    return 0 if ready else 1


def _kubectl(options: argparse.Namespace) -> int:
    existing = _existing_cluster()
    binary = build(CONTROL_PLANE, _log)["kubectl"]
    kubeconfig = existing or str(Node().kubeconfig)
    command = [str(binary), f"--kubeconfig={kubeconfig}", *options.arguments]
    return subprocess.run(command, check=False).returncode


def _running() -> Node:
    node = Node()
    if not node.namespaces.alive():
        message = "there is no node: rose dev up"
        raise DevelopmentError(message)
    return node


def _gpu(options: argparse.Namespace) -> int:
    node = _running()
    if options.action == "show":
        _log(ask_smi(node, *options.words))
        return 0
    with state_of(node) as state:
        _log(f"[gpus] {act(state, options.action, options.words)}")
    return 0


def _second(_options: argparse.Namespace) -> int:
    _running().second().up(log=_log)
    return 0


def _nodes(options: argparse.Namespace) -> int:
    _running().add_kwok_nodes(options.count)
    _log(f"[cluster] {options.count} nodes kwok-N; pods name them, and tolerate {ANNOTATION}")
    return 0


def _load(options: argparse.Namespace) -> int:
    node = _running()
    for archive in options.archives:
        if not archive.is_file():
            raise DevelopmentError(f"{archive} is no file; load takes docker archives")
        node.load(archive.resolve())
        _log(f"[cluster] loaded {archive}; use it with imagePullPolicy: Never")
    return 0


def _dashboards(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    for board in dashboards.ALL:
        target = options.out / f"{board.name}.svg"
        target.write_text(picture(board, last(options.prometheus, options.minutes * 60)))
        _log(f"[dashboards] {target}")
    return 0


_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "build": _build,
    "up": _up,
    "down": _down,
    "status": _status,
    "gpu": _gpu,
    "second": _second,
    "load": _load,
    "nodes": _nodes,
    "dashboards": _dashboards,
    "kubectl": _kubectl,
}


def main(argv: list[str]) -> int:
    """Run one verb of ``rose dev``.

    Returns:
        0 when done, 1 when it failed (the reason is on standard error).
    """
    options = _parser().parse_args(argv)
    try:
        return _VERBS[options.verb](options)
    except DevelopmentError as error:
        print(f"rose dev: {error}", file=sys.stderr)
        return 1
