"""Words that callers of a sandbox host show: read at each request, and one for traffic alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from rose_router.flags import parser as router_parser
from rose_router.flags import settings as router_settings
from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.main import open_host, parser
from rose_sandbox.runtimes import volume
from rose_sandbox.runtimes.parts import Parts
from rose_sandbox.runtimes.volume import Volume
from rose_wire.token_file import TokenFile
from tests.sandbox.test_host import World


@dataclass
class Served:
    url: str
    folder: Path

    def write(self, name: str, word: str) -> None:
        (self.folder / name).write_text(word)

    async def status(self, path: str, word: str | None) -> int:
        """What a GET, or the guard's POST, is answered."""
        headers = {} if word is None else {"Authorization": f"Bearer {word}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            if path == "/traffic":
                async with http.post(self.url + path, json={"serving_burns": True}) as answer:
                    return answer.status
            async with http.get(self.url + path) as answer:
                return answer.status


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    world = World(tmp_path)
    words = TokenFile(tmp_path / "token"), TokenFile(tmp_path / "traffic")
    runner = web.AppRunner(application(world.host, ServingTraffic(), *words))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", tmp_path)
    await world.host.close()
    await runner.cleanup()


async def test_a_token_that_changes_is_asked_for_at_once(served: Served) -> None:
    served.write("token", "old")
    assert await served.status("/sessions", "old") == 200
    served.write("token", "new")
    assert await served.status("/sessions", "old") == 401
    assert await served.status("/sessions", "new") == 200


async def test_while_there_is_no_token_nobody_is_heard(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for word in (None, "", "guess"):
        assert await served.status("/sessions", word) == 401
    assert await served.status("/traffic", "") == 401
    assert await served.status("/healthz", None) == 200
    found = [one.getMessage() for one in caplog.records if "no token in" in one.getMessage()]
    assert len([one for one in found if str(served.folder / "token") in one]) == 1
    served.write("token", "word")
    assert await served.status("/sessions", "word") == 200


async def test_a_guards_word_opens_traffic_and_nothing_else(served: Served) -> None:
    served.write("token", "all")
    assert await served.status("/traffic", "guard") == 401
    served.write("traffic", "guard")
    assert await served.status("/traffic", "guard") == 204
    assert await served.status("/sessions", "guard") == 401
    assert await served.status("/traffic", "all") == 204


def test_a_router_reads_the_token_anew_and_says_what_file_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    given = [*("--lease=a/b", "--sandbox-host=http://x:1"), f"--sandbox-token-file={file}"]
    read = router_settings(router_parser().parse_args(given)).sandbox_token
    assert callable(read)
    assert (read(), read()) == ("", "")
    assert len([one for one in caplog.records if str(file) in one.getMessage()]) == 1
    for word in ("one", "two"):
        file.write_text(word)
        assert read() == word


async def test_a_volume_is_as_large_as_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it sandboxes meet a full disk; a pod whose files outgrow its own is evicted."""
    parts = Parts(tmp_path)
    (tmp_path / "images").mkdir()
    ran: list[str] = []

    async def run(_path: object, *arguments: str | Path) -> bytes:
        await asyncio.sleep(0)
        ran.append(str(arguments[0]))
        return b""

    monkeypatch.setattr(volume, "run", run)
    await Volume(tmp_path, tmp_path / "mounts", parts, 3 << 28).open()
    assert (tmp_path / "volume.img").stat().st_size == 3 << 28
    assert ran == ["mkfs.btrfs", "mount", "btrfs"]
    with pytest.raises(RuntimeFailed, match="768 MiB, and 512 MiB are allowed"):
        await Volume(tmp_path, tmp_path / "mounts", parts, 1 << 29).open()


async def test_a_volume_without_limits_is_refused_however_often_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays mounted when its quota fails, and an open host is not asked again."""
    (tmp_path / "images").mkdir()
    mounted: list[Path] = []

    async def run(_path: object, *arguments: str | Path) -> bytes:
        await asyncio.sleep(0)
        if arguments[0] == "mount":
            mounted.append(Path(arguments[-1]))
        if arguments[0] == "btrfs":
            raise RuntimeFailed("exit code 1")
        return b""

    monkeypatch.setattr(volume, "run", run)
    monkeypatch.setattr(volume, "is_mounted", mounted.__contains__)
    one = Volume(tmp_path, tmp_path / "mounts", Parts(tmp_path), 3 << 28)
    for _ in range(2):
        with pytest.raises(RuntimeFailed, match=r"Linux 6\.7"):
            await one.open()
    assert len(mounted) == 1


def test_a_host_without_any_disk_is_refused_by_name(tmp_path: Path) -> None:
    given = parser().parse_args(["--store=s", "--run=r", "--token-file=t", "--gibibytes=0"])
    with pytest.raises(ValueError, match="--gibibytes 0"):
        open_host(tmp_path, str(tmp_path), "r", gibibytes=given.gibibytes)
