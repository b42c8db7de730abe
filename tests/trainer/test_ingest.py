"""``rose ingest`` against a real store: what a trainer wrote is what an engine would get."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from rose_cli.ops import router_token
from rose_core.delta.bits import Bits
from rose_core.identity import WeightVersion
from rose_trainer.adapters.ingest import (
    Ingest,
    Publishes,
    TrainerState,
    main,
    parser,
    read_checkpoint,
)
from rose_trainer.errors import NotPublished
from rose_trainer.publisher import Publisher
from rose_weights.bundle import Bundle
from rose_weights.send.deltadirs import DeltaDirWriter
from rose_wire.bearer import INGEST, service_token
from rose_wire.flags import refuse_open
from tests.trainer.test_publisher import RunningStore
from tests.weights.models import apply_bundle

PAGES = Path(__file__).parents[2] / "docs" / "trainers"


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(200, 32).to(torch.bfloat16), "norm": torch.ones(32)}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": tensors["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"norm": tensors["norm"]}, folder / "model-00002-of-00002.safetensors")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path / "store")
    yield running
    running.close()


@asynccontextmanager
async def serving(
    publisher: Publishes, root: Path, token: str = "", base: TrainerState | None = None
) -> AsyncIterator[str]:
    runner = web.AppRunner(Ingest(publisher, [root], token, base=base).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ingest"
    finally:
        await runner.cleanup()


async def post(url: str, body: object, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.json()


async def test_a_checkpoint_is_durable_before_the_trainer_may_delete_it(
    store: RunningStore, tmp_path: Path
) -> None:
    first, second = model(1), model(1)
    second["a.weight"][3, 5] += 1
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path) as url:
            for number, tensors in ((1, first), (2, second)):
                folder = write(tmp_path / f"weight_v{number:06d}", tensors)
                status, answer = await post(url, {"path": str(folder), "label": str(number)})
                assert (status, answer["label"]) == (200, str(number))
                shutil.rmtree(folder)
    manifest = await asyncio.to_thread(store.pull, tmp_path / "bundle")
    assert str(manifest.target) == answer["version"]
    held: dict[str, Bits] = {
        "a.weight": np.zeros(200 * 32, "u2"),
        "norm": np.zeros(32, "u4"),
    }
    apply_bundle(held, Bundle(tmp_path / "bundle"))
    expected = second["a.weight"].view(torch.int16).numpy().tobytes()
    assert held["a.weight"].tobytes() == expected


async def test_folders_outside_the_roots_are_refused_links_followed(
    store: RunningStore, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    secret = write(tmp_path / "secret", model(1))
    (root / "link").symlink_to(secret)
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, root) as url:
            for path in (str(secret), str(root / "link"), str(root / ".." / "secret"), "x", None):
                status, answer = await post(url, {"path": path})
                assert status == 400
                assert "path" in answer["message"]


async def test_a_caller_without_the_token_is_refused(store: RunningStore, tmp_path: Path) -> None:
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path, token="k") as url:
            body = {"path": str(write(tmp_path / "x", model(1)))}
            assert (await post(url, body))[0] == 401
            assert (await post(url, body, Authorization="Bearer k"))[0] == 200


async def test_a_checkpoint_of_another_model_is_refused_and_the_run_goes_on(
    store: RunningStore, tmp_path: Path
) -> None:
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path) as url:
            good = write(tmp_path / "good", model(1))
            assert (await post(url, {"path": str(good)}))[0] == 200
            other = {"a.weight": torch.ones(3, 3), "norm": torch.ones(5)}
            status, answer = await post(url, {"path": str(write(tmp_path / "bad", other))})
            assert status == 400
            assert "cannot be published" in answer["message"]
            assert (await post(url, {"path": str(good)}))[0] == 200


def test_a_run_that_cannot_be_is_refused_without_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--store", "127.0.0.1:1", "--run", "R_", "--root", str(tmp_path)])
    assert "'R_' is no run name" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'R_' is no run name"):
        Publisher("127.0.0.1:1", "R_")


def test_it_listens_to_nobody_else_without_a_word_for_callers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store's word is nothing that callers show."""
    (store := tmp_path / "store.token").write_text("word")
    flags = ["--store", "127.0.0.1:1", "--run", "run", "--root", str(tmp_path)]
    assert main([*flags, "--token-file", str(store), "--address", "0.0.0.0:0"]) == 1
    output = capsys.readouterr().err
    assert "--address 0.0.0.0:0: everybody could publish weights" in output
    assert output.rstrip().endswith("give --caller-token-file")


@pytest.mark.parametrize("page", ["README.md", "slime.md"])
async def test_the_pages_commands_have_the_router_heard_and_nobody_else(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PAGES / "README.md").read_text()
    (made,) = re.findall(r"\$ rose router token (.*) > (\S+)", text)
    (tmp_path / "token").write_text("installation")
    words = [str(tmp_path / "token") if one == "token" else one for one in shlex.split(made[0])]
    assert router_token.main(words) == 0
    token = capsys.readouterr().out
    assert token.strip() == service_token("installation", "research/grpo", INGEST)
    (command,) = re.findall(r"    rose ingest (--(?:.*\\\n)*.*)", (PAGES / page).read_text())
    given = parser().parse_args(shlex.split(command.replace("\\\n", "")))
    assert given.caller_token_file == Path(made[1])
    assert given.token_file != given.caller_token_file, "the router's word is none for the store"
    refuse_open(given.address, given.caller_token_file, "")

    class Nobody:
        """No push reaches it."""

    async with serving(Nobody(), tmp_path, token.strip()) as url:  # type: ignore[arg-type]
        for shown, status in ((token.strip(), 400), ("installation", 401)):
            assert (await post(url, {}, Authorization=f"Bearer {shown}"))[0] == status


def test_a_store_that_does_not_answer_is_named_while_it_is_asked_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--store", "127.0.0.1:1", "--run", "run", "--patience-seconds", "1"]
    with caplog.at_level("WARNING", "rose_trainer.takeover"):
        assert main([*flags, "--root", str(tmp_path)]) == 1
    assert "the store at 127.0.0.1:1 does not answer, asked again" in caplog.text
    output = capsys.readouterr().err
    assert "'run' is not published: the store at 127.0.0.1:1 did not answer in 1 s" in output
    assert "rose weights serve" in output


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", model(1))
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"b": "model-00003-of-00003.safetensors"}}'
    )
    with pytest.raises(ValueError, match="model-00003"):
        read_checkpoint(folder)


async def test_a_folder_that_is_asked_for_again_is_published_once(
    store: RunningStore, tmp_path: Path
) -> None:
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path) as url:
            body = {"path": str(write(tmp_path / "x", model(1))), "label": "1"}
            answers = await asyncio.gather(*(post(url, body) for _ in range(3)))
            assert {(status, answer["version"]) for status, answer in answers} == {(200, "run@1.0")}
            # Another name, other files under the same name, and a return to earlier ones are news.
            assert (await post(url, body | {"label": "2"}))[1]["version"] == "run@1.1"
            write(tmp_path / "x", model(2))
            assert (await post(url, body | {"label": "2"}))[1]["version"] == "run@1.2"
            assert (await post(url, body))[1]["version"] == "run@1.3"


async def test_a_push_that_was_not_durable_in_time_goes_on_when_it_is_asked_for_again(
    tmp_path: Path,
) -> None:
    class Slow:
        published = 0
        waited = 0

        def publish(self, step: int, _: object = None) -> WeightVersion:
            self.published += 1
            return WeightVersion("run", 1, step)

        def wait(self, version: WeightVersion, _: float | None = None) -> object:
            self.waited += 1
            if self.waited == 1:
                message = f"{version} was not durable"
                raise NotPublished(message)
            return None

    slow = Slow()
    async with serving(slow, tmp_path) as url:
        body = {"path": str(write(tmp_path / "x", model(1))), "label": "7"}
        assert (await post(url, body))[0] == 503
        status, answer = await post(url, body)
        assert (status, answer["version"]) == (200, "run@1.7")
    assert (slow.published, slow.waited) == (1, 2)


def delta(
    root: Path, number: int, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> Path:
    """A directory as slime and miles write it."""
    writer = DeltaDirWriter(root, number, encoding="overwrite")
    for name, old in before.items():
        writer.add(
            name, *(part.reshape(-1).view(torch.uint8).numpy() for part in (old, after[name]))
        )
    return writer.finish()


async def test_delta_directories_are_published_as_what_they_lead_to(
    store: RunningStore, tmp_path: Path
) -> None:
    states = [model(1) for _ in range(3)]
    for later in states[1:]:
        later["a.weight"][3, 5] += 1
    states[2]["norm"][7] = 9.0
    base = TrainerState.base(write(tmp_path / "base", states[0]))
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path, base=base) as url:
            for number in (1, 2):
                folder = delta(tmp_path, number, *states[number - 1 : number + 1])
                status, answer = await post(url, {"path": str(folder), "label": str(number)})
                assert status == 200, answer
                assert (await post(url, {"path": str(folder), "label": str(number)}))[1][
                    "version"
                ] == answer["version"]
                shutil.rmtree(folder)
    assert answer["version"] == "run@1.1"
    await asyncio.to_thread(store.pull, tmp_path / "bundle")
    held: dict[str, Bits] = {"a.weight": np.zeros(200 * 32, "u2"), "norm": np.zeros(32, "u4")}
    apply_bundle(held, Bundle(tmp_path / "bundle"))
    for name, bits in held.items():
        assert bits.tobytes() == states[2][name].reshape(-1).view(torch.uint8).numpy().tobytes()


async def test_a_delta_that_left_one_out_is_refused_though_its_own_tensors_fit(
    store: RunningStore, tmp_path: Path
) -> None:
    first, second, third = model(1), model(1), model(1)
    second["norm"][7] = third["norm"][7] = 9.0
    third["a.weight"][3, 5] += 1
    base = TrainerState.base(write(tmp_path / "base", first))
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path, base=base) as url:
            skipping = delta(tmp_path, 2, second, third)  # says nothing of what the first changed
            status, answer = await post(url, {"path": str(skipping)})
            assert status == 400
            assert "starts from version 1, the newest here is 0" in answer["message"]
            # A full checkpoint makes it good; deltas go on from its number.
            full = write(tmp_path / "full" / "weight_v000001", second)
            assert (await post(url, {"path": str(full)}))[0] == 200
            assert (await post(url, {"path": str(skipping)}))[0] == 200


async def test_a_delta_on_other_weights_is_refused_by_its_checksum_and_without_a_base_by_name(
    store: RunningStore, tmp_path: Path
) -> None:
    folder = delta(tmp_path, 1, model(1), model(2))
    with Publisher(store.address, "run", token="t") as publisher:
        async with serving(publisher, tmp_path) as url:
            status, answer = await post(url, {"path": str(folder)})
            assert status == 400
            assert "start rose ingest with --base" in answer["message"]
        other = TrainerState.base(write(tmp_path / "other", model(3)))
        async with serving(publisher, tmp_path, base=other) as url:
            status, answer = await post(url, {"path": str(folder)})
            assert status == 400
            assert "is that what you have?" in answer["message"]


def test_a_folder_without_safetensors_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        read_checkpoint(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_checkpoint(tmp_path)
