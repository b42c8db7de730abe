"""A stand-in for ``nvidia-smi memory-limits``: same grammar, limits kept in a file, no GPU.

    memory-limits --set --namespace CGROUP --soft-limit MIB --hard-limit MIB -i GPU
    memory-limits --get -n CGROUP -i GPU

``ROSE_FAKE_LIMITS`` names the file (JSON: cgroup -> GPU -> soft, hard). A cgroup without limits of
its own reads as the whole device of 80 GiB. With ``ROSE_FAKE_LIMITS_DEAF`` set, a limit is taken
and not kept, as on a cgroup that the controller does not cover.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

WHOLE_MIB = 80 * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nvidia-smi")
    parser.add_argument("command", choices=["memory-limits"])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--set", action="store_true")
    mode.add_argument("--get", action="store_true")
    parser.add_argument("-n", "--namespace", required=True, type=Path)
    parser.add_argument("--soft-limit", type=int, default=0)
    parser.add_argument("--hard-limit", type=int, default=WHOLE_MIB)
    parser.add_argument("-i", "--id", required=True)
    return parser


def main(argv: list[str]) -> int:
    """Answer as ``nvidia-smi`` would, from a file of limits.

    Returns:
        Exit code.
    """
    arguments = _parser().parse_args(argv)
    store = Path(os.environ["ROSE_FAKE_LIMITS"])
    if not arguments.namespace.is_dir():
        sys.stdout.write(f"No such namespace: {arguments.namespace}\n")
        return 6
    known = json.loads(store.read_text()) if store.exists() else {}
    if arguments.set and not os.environ.get("ROSE_FAKE_LIMITS_DEAF"):
        own = known.setdefault(str(arguments.namespace), {})
        own[arguments.id] = [arguments.soft_limit, arguments.hard_limit]
        store.write_text(json.dumps(known))
    if arguments.get:
        soft, hard = known.get(str(arguments.namespace), {}).get(arguments.id, (0, WHOLE_MIB))
        sys.stdout.write(
            f"namespace: {arguments.namespace}\nsoft limit: {soft} MiB\n"
            f"hard limit: {hard} MiB\ncurrent used: 0 MiB\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
