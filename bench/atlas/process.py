"""Every architecture of a list, committed in place and loaded anew, run by the engine's Python.

A tiny checkpoint A and another one B of the same model are made by transformers' class of it and
saved under their published names. SGLang's own loader loads A, ROSE derives its layout and writes
B's elements in place, and SGLang loads B into a second model. Then every tensor that can be reached
from the modules is compared bit by bit, not parameters alone.
Usage: ``list`` FOLDER, or PORT FOLDER NAME..., where FOLDER has a NAME.json with each
configuration; each NAME gets a NAME.result.json. One process for all: importing SGLang takes longer
than a model.
"""

# SGLang reads its environment while it is imported, and is not installed where this is checked.
# ruff: noqa: PLC0415, SLF001

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from bench.atlas.shapes import SHAPES, tiny
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors import layout, parameters
from rose_engines.tensors.safetensors import read_checkpoint
from tests.engines import loader_process

EXACT, RENEWED, REFUSED = "exact", "exact after refresh", "refused"
PLAIN = "qwen3"
WRONG, NOT_BUILT = "silently wrong", "does not build"


def write_checkpoint(folder: Path, settings: dict[str, Any], seed: int) -> None:
    """Random weights as transformers saves them, with the configuration as given."""
    import transformers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, settings["architectures"][0])
    model = kind._from_config(config, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=draw)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = buffer.data.float()  # as it is published, whatever the rest is
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data = parameter.data.float()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))


def registered(folder: Path) -> None:
    """Write a tiny configuration of every causal language model that transformers has a class of.

    ``registry.json`` says how many there are, and the names of those that have no published shape.
    """
    import transformers
    from sglang.srt.models.registry import ModelRegistry

    published = {shape["architectures"][0] for shape in SHAPES.values()}
    text = [name for name in ModelRegistry.models if name.endswith(("ForCausalLM", "LMHeadModel"))]
    classes = {name: getattr(transformers, name, None) for name in sorted(text)}
    kinds = {name: getattr(one, "config_class", None) for name, one in classes.items()}
    names = []
    for architecture, kind in kinds.items():
        if kind is None or architecture in published:
            continue
        settings = json.loads(kind().to_json_string())
        settings |= {"architectures": [architecture], "model_type": kind.model_type}
        settings["torch_dtype"] = "bfloat16"
        name = kind.model_type.replace("_", "-")
        (folder / f"{name}.json").write_text(json.dumps(tiny(settings)))
        names.append(name)
    counts = {
        "registered": len(ModelRegistry.models),
        "text": len(text),
        "classes": sum(kind is not None for kind in kinds.values()),
    }
    (folder / "registry.json").write_text(json.dumps({"names": names, "counts": counts}))


def finish(model: torch.nn.Module) -> torch.nn.Module:
    """What SGLang does to a model after its loader: quantisation methods may repack weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
    return model


def commit(folder: Path, model: torch.nn.Module, other: Path) -> bool:
    """Write another checkpoint's elements into a model that has loaded ``folder``.

    Returns:
        Whether something that is made of weights was made anew.

    Raises:
        UnsupportedEngine: its layout is refused, with the reason.
    """
    named, checkpoint = dict(model.named_parameters()), read_checkpoint(folder)
    found = layout.find(
        model,  # type: ignore[arg-type]
        named,
        checkpoint,
        twin=lambda: loader_process.twin(str(folder)),
    )
    layout.check_placed(found.boxes)
    known = layout.renewals(model, named)  # type: ignore[arg-type]
    live = parameters.live_tensors(named, checkpoint, found.boxes, known, found.computed)
    target = read_checkpoint(other)
    for name, tensor in live.items():
        bits = target[name][2]
        where, kept = tensor.own(slice(0, bits.size))
        tensor.put(where, bits if kept is None else bits[kept])
    return bool(known or found.computed.made)


def differing(ours: torch.nn.Module, fresh: torch.nn.Module) -> tuple[int, list[str]]:
    """How many tensors can be reached from the modules, and the paths of those that differ."""
    left, right = (
        {path: held.value for path, held in layout._tensors(layout._reachable(model)).items()}  # type: ignore[arg-type]
        for model in (ours, fresh)
    )
    wrong = sorted(left.keys() ^ right.keys())
    wrong += [path for path in left.keys() & right.keys() if not _same(left[path], right[path])]
    return len(left), sorted(wrong)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    sides = (side.detach().contiguous().view(-1).view(torch.uint8) for side in (one, other))
    return torch.equal(*sides)


def examine(folder: Path, name: str) -> dict[str, Any]:
    """The verdict on one architecture."""
    settings = json.loads((folder / f"{name}.json").read_bytes())
    found = {"architecture": settings["architectures"][0], "tensors": 0, "why": ""}
    first, second = folder / f"{name}.a", folder / f"{name}.b"
    try:
        for number, one in enumerate((first, second)):
            if not one.exists():
                write_checkpoint(one, settings, number)
        ours, fresh = (finish(loader_process.load(str(one))) for one in (first, second))
    except Exception as error:  # noqa: BLE001  # SGLang and transformers may raise anything
        traceback.print_exc()
        return found | {"result": NOT_BUILT, "why": f"{type(error).__name__}: {error}"[:300]}
    try:
        renewed = commit(first, ours, second)
    except UnsupportedEngine as refused:
        return found | {"result": REFUSED, "why": str(refused)}
    count, wrong = differing(ours, fresh)
    found["tensors"] = count
    if wrong:
        return found | {"result": WRONG, "why": f"{len(wrong)} differ, as {wrong[0]}"}
    return found | {"result": RENEWED if renewed else EXACT}


def main(port: int, folder: Path, names: list[str]) -> None:
    """Examine every architecture that has no result yet."""
    # SGLang takes its settings from one model for all; those of a state space suit no other.
    plain = folder / f"{PLAIN}.a"
    if not plain.exists():
        write_checkpoint(plain, tiny(SHAPES[PLAIN]), 0)
    loader_process.prepare(str(plain), 0, 1, port)
    for number, name in enumerate(names):
        found = examine(folder, name)
        (folder / f"{name}.result.json").write_text(json.dumps(found))
        print(f"{number + 1}/{len(names)} {name}: {found['result']} {found['why']}", flush=True)


if __name__ == "__main__" and sys.argv[1] == "list":
    registered(Path(sys.argv[2]))
elif __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
