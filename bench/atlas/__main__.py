"""Which architectures a commit in place leaves exact: ``make atlas``, and docs/atlas.md of it.

Results are kept in ``out/atlas`` and used again; ``--again`` forgets them. The page says what was
not examined.
"""

# ruff: noqa: E501  # sentences of the page

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.atlas.shapes import SHAPES, asked, tiny
from rose_dev.engine_environment import engine_python
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import python_path
from rose_wire.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("process.py")
LISTED = "registry.json"
PAGE = ROOT / "docs" / "atlas.md"


def examined(
    names: list[str], folder: Path, run: Callable[[list[str], Path], None] | None = None
) -> None:
    """Have the engine's Python examine those that have no result.

    Args:
        names: of ``SHAPES``.
        folder: where models and results go.
        run: runs ``PROGRAM`` with its arguments, in that folder; a new process by default.
    """
    for name in names:
        path = folder / f"{name}.json"
        settings = tiny(SHAPES[name]) if name in SHAPES else json.loads(path.read_bytes())
        path.write_text(json.dumps(asked(settings)))
    (run or _in_processes)([str(free_port()), str(folder), *names], folder)


def _in_processes(arguments: list[str], folder: Path) -> None:
    """One process for all; where a model's own code ends it, another for those behind."""
    left = arguments[2:]
    while left:
        ended = _in_a_process([str(free_port()), str(folder), *left], folder)
        left = [name for name in left if not (folder / f"{name}.result.json").exists()]
        if not left:
            break
        settings = json.loads((folder / f"{left[0]}.json").read_bytes())
        found = {
            "architecture": settings["architectures"][0],
            "tensors": 0,
            "result": "does not build",
            "why": f"the process ended with {ended}",
        }
        (folder / f"{left[0]}.result.json").write_text(json.dumps(found))


def _in_a_process(arguments: list[str], folder: Path) -> int:
    launch = Launch(python=engine_python(), model=folder, port=0, plugin_socket=folder / "s")
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join([*map(str, python_path(launch)), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PLUGINS": "none",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
    }
    command = [str(engine_python()), str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, check=False, cwd=ROOT).returncode


def page(results: dict[str, dict[str, Any]], registry: dict[str, int]) -> str:
    """The page as Markdown."""
    counts = Counter(one["result"] for one in results.values())
    built = sum(counts.values()) - counts["does not build"]
    rows = [
        f"| `{one['architecture']}` | {name} | {one['result']} | {one['tensors'] or ''} | "
        f"{one['why'].replace('|', '/').replace(chr(10), ' ')} |"
        for name, one in sorted(results.items(), key=lambda item: (item[1]["result"], item[0]))
    ]
    return "\n".join(
        [
            "# Which architectures a commit in place leaves exact",
            "",
            f"Of {built} models that build at a tiny size on CPU, {counts['exact']} are exact, "
            f"{counts['exact after refresh']} exact after what is made of weights was refreshed in "
            f"place, "
            f"{counts['refused']} are refused by name and {counts['silently wrong']} are silently "
            f"wrong. {counts['does not build']} of {len(results)} did not build here.",
            "",
            "SGLang loads a checkpoint A, ROSE writes a checkpoint B in place, and SGLang loads B into "
            "a second model.",
            "Then every tensor that can be reached from the modules is compared bit by bit: "
            "parameters, buffers, and what hangs in lists, dictionaries and objects.",
            "A refused engine ends with the reason, or loads patched checkpoints where the platform "
            "lets it ([engines](engines.md)).",
            "",
            "| architecture | model | result | tensors compared | reason |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Of {registry['registered']} architectures in SGLang's registry on CPU, {registry['text']} are called causal language models, and transformers "
            f"has a class for {registry['classes']} of those, with which a checkpoint can be made: these are examined. Not examined: the others, and models with images.",
            "",
            "Not covered: several ranks, layouts of GPUs (some quantisation methods repack weights there alone), and tensors that only a closure, a class or slots hold.",
            "",
            "`make atlas` makes this page; what has been examined is kept in `out/atlas`.",
            "",
        ]
    )


def main(argv: list[str]) -> int:
    """Examine and write the page.

    Returns:
        1 when an architecture is silently wrong.
    """
    parser = argparse.ArgumentParser(prog="bench.atlas", description=__doc__)
    parser.add_argument("names", nargs="*", help="of bench/atlas/shapes.py; none = all")
    parser.add_argument("--again", action="store_true", help="forget what was examined")
    asked = parser.parse_args(argv)
    folder = ROOT / "out" / "atlas"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / LISTED).exists():
        _in_a_process(["list", str(folder)], folder)
    listed = json.loads((folder / LISTED).read_bytes())
    # Those with images are left out: their sizes lie in parts that ``tiny`` does not know.
    known = [name for name in SHAPES if not name.endswith(("-small", "-images"))] + listed["names"]
    names = asked.names or known
    if asked.again:
        for name in names:
            (folder / f"{name}.result.json").unlink(missing_ok=True)
            for side in "ab":
                shutil.rmtree(folder / f"{name}.{side}", ignore_errors=True)
    left = [name for name in names if not (folder / f"{name}.result.json").exists()]
    if left:
        examined(left, folder)
    results = {
        name: json.loads(path.read_bytes())
        for name in known
        if (path := folder / f"{name}.result.json").exists()
    }
    PAGE.write_text(page(results, listed["counts"]))
    return int(any(one["result"] == "silently wrong" for one in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
