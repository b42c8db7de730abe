"""``make gpu-pack``: what ``make gpu-check`` needs on a machine without a network, in small pieces.

``out/gpu-pack`` holds wheels for Linux and Python 3.11 (torch and nvidia-ml-py with what they need)
and the checkout's ``bench``, split into pieces of at most 60 MB, and ``unpack.sh``, which joins
them, makes an environment and says how to run the check. Sums of every piece are checked.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIECE_BYTES = 60_000_000
WHEELS = ("torch", "numpy", "nvidia-ml-py")
CODE = ("bench", "engines/rose_engines", "agent/rose_agent", "rose_core")
_BLOCK = 1 << 20
_UNPACK = """#!/bin/sh
# Joins the pieces, checks them, makes an environment in ./gpu-check.
set -eu
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
mkdir -p gpu-check
cat pack.tar.* | tar -x -C gpu-check
python3 -m venv gpu-check/venv
gpu-check/venv/bin/pip install --quiet --no-index --find-links gpu-check/wheels {wheels}
echo "cd gpu-check; PYTHONPATH=.:engines:agent venv/bin/python -m bench.gpu --run 1 # then 2"
"""


def split(source: Iterable[bytes], folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write a stream as numbered pieces, none larger than asked."""
    pieces: list[Path] = []
    left = 0
    for block in source:
        rest = block
        while rest:
            if not left:
                pieces.append(folder / f"pack.tar.{len(pieces):03}")
                left = piece_bytes
            with pieces[-1].open("ab") as out:
                out.write(rest[:left])
            taken = min(left, len(rest))
            left, rest = left - taken, rest[taken:]
    return pieces


def write_sums(folder: Path, pieces: Iterable[Path]) -> None:
    """``SHA256SUMS`` as ``sha256sum --check`` reads it."""
    rows = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in pieces]
    (folder / "SHA256SUMS").write_text("".join(rows))


def pack(folder: Path, wheels: Path) -> list[Path]:
    """Everything from a folder of wheels and the checkout.

    Raises:
        FileExistsError: the folder holds an older pack.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; remove it first")
    with tempfile.NamedTemporaryFile(dir=folder.parent) as whole:
        with tarfile.open(fileobj=whole, mode="w") as out:
            out.add(wheels, "wheels")
            for part in CODE:
                out.add(ROOT / part, part, filter=_without_caches)
        whole.flush()
        pieces = split(_blocks(Path(whole.name)), folder)
    write_sums(folder, pieces)
    script = folder / "unpack.sh"
    script.write_text(_UNPACK.format(wheels=" ".join(WHEELS)))
    script.chmod(0o755)
    return pieces


def _without_caches(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in item.name else item


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def main(argv: list[str]) -> int:
    """Download the wheels and pack them."""
    parser = argparse.ArgumentParser(prog="bench.gpu.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-pack")
    parser.add_argument("--python", default="3.11", help="of the machine with the GPU")
    words = parser.parse_args(argv)
    words.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=words.out.parent) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--python-version", words.python, "--dest", wheels]
        subprocess.run([*command, *WHEELS], check=True)
        pieces = pack(words.out, Path(wheels))
    sys.stdout.write(f"{len(pieces)} pieces in {words.out}; start unpack.sh there\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
