"""``rose router`` as a process: starts, takes engines and turns, ends on SIGTERM."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_dev.owners import owner
from rose_router.flags import parser, settings
from rose_router.http.admission.bearer import RunningRequests
from rose_router.main import main
from rose_router.turns.supervisor import Supervisor


async def ports(child: asyncio.subprocess.Process) -> tuple[int, int]:
    """The ports it was given, from its log."""
    assert child.stderr is not None
    async for line in child.stderr:
        found = re.search(rb"turns on port (\d+), engines on port (\d+)", line)
        if found:
            return int(found[1]), int(found[2])
    pytest.fail("the router ended without saying its ports")


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


async def test_it_starts_and_drains_on_sigterm(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rose_cli.main",
        "router",
        "--lease=team/grpo",
        "--http-address=127.0.0.1:0",
        "--attach-address=127.0.0.1:0",
        f"--token-file={token}",
        "--drain-seconds=60",
        stderr=asyncio.subprocess.PIPE,
    )
    update = EngineUpdate(
        "a", EngineKind.BORROWED, "team/grpo", "http://127.0.0.1:9", version="run@1.0", cap=1
    )
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            port, attach = await ports(child)
            url = f"http://127.0.0.1:{port}"
            while not await answers(http, f"{url}/healthz"):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
            async with owner(attach, update, "secret"):
                while not await answers(http, f"{url}/ready"):  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.1)
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(
    ("watch", "loop"),
    [
        # Turns on a closed gate would wait for ever.
        (Supervisor, "run"),
        # A stream of a caller who may call no longer would go on.
        (RunningRequests, "_run"),
    ],
)
def test_a_router_ends_when_a_loop_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    watch: type,
    loop: str,
) -> None:
    async def break_down(_self: object) -> None:
        raise KeyError("engine-7")

    monkeypatch.setattr(watch, loop, break_down)
    token = tmp_path / "token"
    token.write_text("secret\n")
    addresses = [f"--{name}-address=127.0.0.1:0" for name in ("http", "attach", "peer")]
    assert main(["--lease=team/grpo", f"--token-file={token}", *addresses]) == 1
    assert "break_down has ended" in caplog.text
    assert "engine-7" in caplog.text


async def test_flags_become_settings(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    given = parser().parse_args(
        ["--lease=a/b", f"--token-file={token}", "--max-staleness=3", "--pause-seconds=2.5"]
    )
    made = settings(given)
    assert (made.lease, made.attach_token) == ("a/b", "secret")
    assert made.policies.placement.max_staleness == 3
    assert made.patience.pause_seconds == 2.5


def test_one_set_of_flags_serves_the_routers_of_all_leases(tmp_path: Path) -> None:
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "tokenizer.json").touch()
    (tmp_path.parent / "tokenizer.json").touch()
    shared = [f"--tokenizers={tmp_path}", "--ingest-url=http://ingest-{lease}.{namespace}:7500/"]
    for model, found in (("qwen3-8b", tmp_path / "qwen3-8b"), ("other", None), ("..", None)):
        made = settings(parser().parse_args(["--lease=team/grpo", f"--model={model}", *shared]))
        assert made.tokenizer == found
        assert made.ingest_url == "http://ingest-grpo.team:7500"


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [([], 1), (["--dedicated=a", "--dedicated=b"], 2), (["--dedicated=a", "--reported-gpus=8"], 8)],
)
def test_the_size_it_reports_is_that_of_the_dedicated_engines(flags: list[str], gpus: int) -> None:
    assert settings(parser().parse_args(["--lease=team/grpo", *flags])).reported_gpus == gpus


@pytest.mark.parametrize("url", ["http://{run}:1", "http://{}:1", "http://{lease.x}:1", "http://{"])
def test_an_ingest_url_with_other_names_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--ingest-url"):
        settings(parser().parse_args(["--lease=team/grpo", f"--ingest-url={url}"]))


def test_a_missing_token_file_ends_it_with_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--lease=a/b", f"--token-file={tmp_path / 'none'}"]) == 1
    assert "none" in capsys.readouterr().err
