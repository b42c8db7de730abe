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

from bench.atlas.shapes import SHAPES
from rose_dev.engine_environment import engine_python
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import python_path
from rose_wire.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("process.py")
PAGE = ROOT / "docs" / "atlas.md"
LAYERS = 4
# Widths that fit each other; whatever is not here stays as it was published.
_TINY = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 256,
    "num_experts": 4,
    "n_routed_experts": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "head_dim": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "q_lora_rank": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_d_state": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_head_dim": 64,
    "linear_num_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 256,
    "expert_ffn_hidden_size": 128,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "dim_model_base": 64,
}


def tiny(shape: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small."""
    small = {key: _TINY[key] if value and key in _TINY else value for key, value in shape.items()}
    if "num_key_value_heads" in shape:
        whole = shape["num_key_value_heads"] == shape["num_attention_heads"]
        small["num_key_value_heads"] = 4 if whole else 2
    if types := shape.get("layer_types"):
        # The first of each kind come first, so that no kind is lost.
        kinds = list(dict.fromkeys(types))
        small["layer_types"] = (kinds * LAYERS)[:LAYERS]
    if shape.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    if shape.get("n_group"):
        small["n_group"], small["topk_group"] = min(shape["n_group"], 2), 1
    return small


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
        (folder / f"{name}.json").write_text(json.dumps(tiny(SHAPES[name])))
    (run or _in_a_process)([str(free_port()), str(folder), *names], folder)


def _in_a_process(arguments: list[str], folder: Path) -> None:
    launch = Launch(python=engine_python(), model=folder, port=0, plugin_socket=folder / "s")
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join([*map(str, python_path(launch)), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PLUGINS": "none",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
    }
    subprocess.run([engine_python(), PROGRAM, *arguments], env=environment, check=True, cwd=ROOT)


def page(results: dict[str, dict[str, Any]]) -> str:
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
            "Not examined: models with images, and the other architectures of SGLang's registry. Not covered: several ranks, layouts of GPUs "
            "(some quantisation methods repack weights there alone), and tensors that only a closure, "
            "a class or slots hold.",
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
    # Those with images are left out: their sizes lie in parts that ``tiny`` does not know.
    known = [name for name in SHAPES if not name.endswith(("-small", "-images"))]
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
    PAGE.write_text(page(results))
    return int(any(one["result"] == "silently wrong" for one in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
