"""``make gpu-pack``: what ``make gpu-check`` needs on a machine without a network, in small pieces.

``out/gpu-pack`` holds wheels for Linux and the checkout's code, split into pieces of at most 60 MB,
and ``unpack.sh``, which joins them, checks their sums and writes ``gpu-check/check.sh``:

| pack | wheels | Python there |
|---|---|---|
| whole | torch and everything else | any of ``--python``, with venv; an environment of its own |
| ``--light`` | what a machine with torch lacks, a few MB | its ``python3``, with torch and numpy |

Neither changes a package that is installed there. ``--python`` has to be the version there.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.gpu import suite

ROOT = Path(__file__).parents[2]
PIECE_BYTES = 60_000_000
# What the checks import besides torch: NVML, the digest's own needs, and the memory saver.
LIGHT = ("nvidia-ml-py", "msgspec", "typing-extensions", "zstandard", "torch-memory-saver")
WHOLE = ("torch", "numpy", *LIGHT)
# ``rose_dev`` has the NVML of a rehearsal.
CODE = ("bench", "engines/rose_engines", "agent/rose_agent", "rose_core", "dev/rose_dev")
_PATH = ":".join((".", *sorted({part.split("/")[0] for part in CODE if "/" in part})))
_BLOCK = 1 << 20
_UNPACK = """#!/bin/sh
# Joins the pieces, checks them, makes ./gpu-check with all that the check needs. No network.
set -eu
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
test ! -e gpu-check || {{ echo "gpu-check is there already; remove it first" >&2; exit 1; }}
mkdir gpu-check
cat pack.tar.* | tar -x -C gpu-check
cd gpu-check
{install}
cat > check.sh <<END
#!/bin/sh
cd "$PWD"
PYTHONUNBUFFERED=1 PYTHONPATH={path} exec "$python" -m bench.gpu "\\$@"
END
chmod 755 check.sh
echo "gpu-check/check.sh --rehearse  # without a GPU; then --run 1 and --run 2, {bound:.0f} s each"
"""
_WHOLE = """python3 -m venv venv
venv/bin/pip install --quiet --no-index --find-links wheels {wheels}
python="$PWD/venv/bin/python\""""
_LIGHT = """python3 -c 'import numpy, torch' || {{ echo "python3 has no torch" >&2; exit 1; }}
python3 -m pip install --quiet --no-index --no-deps --find-links wheels --target site {wheels}
python="$(command -v python3)\""""


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


def pack(folder: Path, wheels: Path, *, light: bool = False) -> list[Path]:
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
    script.write_text(unpack_script(light=light))
    script.chmod(0o755)
    return pieces


def unpack_script(*, light: bool) -> str:
    """The shell script that lies beside the pieces."""
    install = (_LIGHT if light else _WHOLE).format(wheels=" ".join(LIGHT if light else WHOLE))
    path = f"site:{_PATH}" if light else _PATH
    return _UNPACK.format(install=install, path=path, bound=suite.BOUND_SECONDS)


def _without_caches(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in item.name else item


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def download(wheels: Path, names: Sequence[str], python: str, *, light: bool) -> None:
    """Wheels of the versions in ``constraints.txt``, for that Python on this kind of machine.

    Raises:
        CalledProcessError: pip could not get one; it has said which.
    """
    with tempfile.TemporaryDirectory() as tools:
        # An environment that uv made has no pip.
        venv.create(tools, with_pip=True)
        command = [f"{tools}/bin/python", "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        command += ["--python-version", python, "--dest", str(wheels)]
        command += ["--no-deps"] if light else []
        command += ["-c", str(ROOT / "constraints.txt"), *names]
        subprocess.run(command, check=True)


def main(argv: list[str]) -> int:
    """Download the wheels and pack them."""
    parser = argparse.ArgumentParser(prog="bench.gpu.pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-pack")
    parser.add_argument("--python", default="3.11", help="of the machine with the GPU")
    parser.add_argument("--light", action="store_true", help="for a machine that has torch")
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = LIGHT if options.light else WHOLE
    with tempfile.TemporaryDirectory(dir=options.out.parent) as wheels:
        download(Path(wheels), names, options.python, light=options.light)
        pieces = pack(options.out, Path(wheels), light=options.light)
    sys.stdout.write(f"{len(pieces)} pieces in {options.out}; start unpack.sh there\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
