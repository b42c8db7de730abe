"""What a host tells of the models on its node."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rose_agent.host.discovery.inventory import Inventory
from rose_core.wire.sync import MOST_MODELS, NodeModel


def a_model(folder: Path, rows: int = 4, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(rows, 4)}, folder / "model.safetensors")
    return folder


async def looked(inventory: Inventory) -> dict[str, NodeModel]:
    await inventory.refresh()
    assert inventory.models is not None
    return {one.name: one for one in inventory.models}


async def test_models_come_and_go_and_nothing_else_is_told(tmp_path: Path) -> None:
    a_model(tmp_path / "small")
    (tmp_path / "notes").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "no weights").mkdir()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text("{}")
    inventory = Inventory(tmp_path)
    (small,) = (await looked(inventory)).values()
    sizes = sum(path.stat().st_size for path in (tmp_path / "small").iterdir())
    assert (small.name, small.bytes) == ("small", sizes)
    shutil.copytree(tmp_path / "small", tmp_path / "copy")
    both = await looked(inventory)
    assert both["copy"].digest == small.digest, "a digest is of the content alone"
    shutil.rmtree(tmp_path / "small")
    assert set(await looked(inventory)) == {"copy"}


async def test_a_file_may_be_called_by_any_bytes(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "odd")
    (folder / os.fsdecode(b"\xff")).write_text("")
    a_model(tmp_path / "small")
    assert set(await looked(Inventory(tmp_path))) == {"odd", "small"}


@pytest.mark.parametrize("change", ["shape", "config", "size"])
async def test_another_content_of_the_name_has_another_digest(tmp_path: Path, change: str) -> None:
    folder = a_model(tmp_path / "m", hidden=4)
    inventory = Inventory(tmp_path)
    before = (await looked(inventory))["m"]
    if change == "config":
        (folder / "config.json").write_text(json.dumps({"hidden": 8}))
    else:
        shape = (2, 8) if change == "shape" else (8, 4)
        save_file({"w": torch.zeros(*shape)}, folder / "model.safetensors")
    assert (await looked(inventory))["m"].digest != before.digest


async def test_of_a_folder_that_cannot_be_read_nothing_is_known(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path / "missing")
    await inventory.refresh()
    assert inventory.models is None


async def test_of_a_folder_with_very_many_some_are_told(tmp_path: Path) -> None:
    a_model(tmp_path / "m000")
    for number in range(1, MOST_MODELS + 3):
        shutil.copytree(tmp_path / "m000", tmp_path / f"m{number:03}")
    assert len(await looked(Inventory(tmp_path))) == MOST_MODELS


async def test_weights_that_are_none_are_told_as_they_are(tmp_path: Path) -> None:
    folder = a_model(tmp_path / "m")
    for text in (b"", b"abc", b"\xff" * 16):
        (folder / "model.safetensors").write_bytes(text)
        assert (await looked(Inventory(tmp_path)))["m"].digest
