"""A dedicated engine: permit held by the host, attached to a router, honest about its version."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import shlex
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from yarl import URL

from rose_agent.errors import BadInput
from rose_agent.host import dedicated, main
from rose_agent.host.options.arguments import encrypts, parser
from rose_agent.host.options.dedicated_file import DedicatedFile
from rose_agent.host.processes.classes import LAUNCHERS
from rose_agent.os.freezers import detect
from rose_core.wire.host import HostStatusRequest
from rose_core.wire.routing import EngineKind, EngineUpdate, RouterNote
from rose_core.wire.tokenizer_files import digest, pack
from rose_engines.node.rundir import EngineFile, RunDir, WeightsFile, read_json, write_json
from rose_wire import certificates
from rose_wire.rpc import Server
from rose_wire.services import ATTACH
from tests.host.helpers import body, until

FILE = """
name: dedicated-0
engineClass: fake
model: small
run: grpo
weightEndpoint: 127.0.0.1:1
maxRunning: 3
"""


ROUTED = 'arguments: {enable-return-routed-experts: "true"}'


class Router:
    """Takes attachments; remembers what it was told."""

    def __init__(self, token: str) -> None:
        self.updates: list[EngineUpdate] = []
        self.attached = 0
        self._server = Server(token=token)
        self._server.bidirectional(ATTACH, self._attach)

    async def _attach(self, updates: AsyncIterator[EngineUpdate]) -> AsyncIterator[RouterNote]:
        self.attached += 1
        async for update in updates:
            self.updates.append(update)
            yield RouterNote()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        return f"127.0.0.1:{await self._server.start(address)}"

    async def stop(self) -> None:
        await self._server.stop(0.0)

    async def until(self, text: str, wanted: object) -> EngineUpdate:
        async def reported() -> bool:
            return bool(self.updates) and getattr(self.updates[-1], text) == wanted

        await until(reported, f"the router hears {text}={wanted!r}")
        return self.updates[-1]


@contextlib.asynccontextmanager
async def started(
    rundir: Path,
    models: Path,
    router: str,
    given: str = "install",
    *,
    more: tuple[str, ...] = (),
    content: str = FILE,
) -> AsyncIterator[tuple[main.RunningHost, dedicated.DedicatedAttachment]]:
    file, secret = rundir / "dedicated.yaml", rundir / "token"
    file.write_text(content)
    secret.write_text(given + "\n")
    arguments = parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(models), "--data-port", "0"),
            *("--http-port", "0", "--dedicated", str(file), "--router", router),
            *("--lease", "team/lease", "--token-file", str(secret), *more),
        ]
    )
    host = await main.start(arguments, detect("signals", scope=str(rundir)))
    attachment = await dedicated.begin(arguments, host.host)
    try:
        yield host, attachment
    finally:
        await attachment.leave()
        await host.stop(0.0)


async def test_it_is_attached_gated_and_leaves(rundir: Path, models: Path) -> None:
    router = Router("install")
    (models / "small" / "tokenizer.json").write_text("{}")
    async with started(rundir, models, await router.start()) as (host, _):
        update = await router.until("gate_open", True)
        assert update.tokenizer == digest(pack({"tokenizer.json": b"{}"}))
        assert update.kind is EngineKind.DEDICATED
        assert (update.engine, update.lease, update.cap) == ("dedicated-0", "team/lease", 3)
        assert update.version == ""  # nothing attested: no turns yet
        record = read_json(RunDir(rundir).slot("dedicated-0").engine, EngineFile)
        assert record is not None
        assert record.dedicated
        weights = WeightsFile(
            version="grpo@1.0",
            digest="d",
            attested=True,
            head="grpo@1.1",
            engine_started_ns=record.started_ns,
        )
        write_json(RunDir(rundir).slot("dedicated-0").weights, weights)
        update = await router.until("version", "grpo@1.0")
        assert (update.digest, update.head) == ("d", "grpo@1.1")
        bearer = {"Authorization": f"Bearer {update.token}"}
        async with aiohttp.ClientSession() as client:
            url = f"{update.url}/generate"
            async with client.post(url, json=body(5), headers=bearer) as reply:
                assert reply.status == 200
        RunDir(rundir).stop.touch()
        await router.until("gate_open", False)
        RunDir(rundir).stop.unlink()
        await router.until("gate_open", True)
        assert (await host.host.status(HostStatusRequest())).engines[0].generated_tokens == 5
    assert router.updates[-1].leaving
    assert not router.updates[-1].gate_open
    await router.stop()


@pytest.mark.parametrize("does", [False, True])
async def test_a_router_is_told_what_the_engine_refuses_and_whether_it_drafts_not_whether_it_shall(
    rundir: Path, models: Path, monkeypatch: pytest.MonkeyPatch, does: bool
) -> None:
    fake = LAUNCHERS["fake"]
    refuses = ("min_p",) if does else ()
    monkeypatch.setitem(
        LAUNCHERS, "fake", lambda o: dataclasses.replace(fake(o), drafts=does, refuses=refuses)
    )
    router = Router("install")
    content = f"{FILE}drafts: true\n"
    async with started(rundir, models, await router.start(), content=content):
        update = await router.until("gate_open", True)
        assert (update.drafts, update.refuses) == (does, refuses)
    await router.stop()


async def test_its_pod_is_ready_once_its_engine_runs(rundir: Path, models: Path) -> None:
    async with started(rundir, models, "127.0.0.1:1") as (host, _), aiohttp.ClientSession() as http:
        seen: list[tuple[int, str]] = []

        async def ready() -> bool:
            async with http.get(f"http://127.0.0.1:{host.http_port}/readyz") as answer:
                seen.append((answer.status, await answer.text()))
            return answer.status == 200

        await until(ready, "the probe of readiness says yes")
        assert seen[0] == (503, "its engine is starting\n")
        assert seen[-1] == (200, "ok\n")


async def test_a_router_that_comes_back_is_attached_to_again(rundir: Path, models: Path) -> None:
    first = Router("install")
    address = await first.start()
    async with started(rundir, models, address):
        await first.until("gate_open", True)
        await first.stop()
        second = Router("install")
        await second.start(address)
        await second.until("gate_open", True)
    assert second.attached >= 1
    await second.stop()


async def test_a_wrong_token_attaches_nothing(rundir: Path, models: Path) -> None:
    router = Router("install")
    async with started(rundir, models, await router.start(), given="wrong"):
        await asyncio.sleep(0.5)
        assert router.attached == 0
    await router.stop()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("name: dedicated-0", "name: Not/AName"), "name"),
        (("model: small", ""), "model"),
        (("maxRunning: 3", "maxRunning: 0"), "maxRunning"),
        (("maxRunning: 3", "speed: 9"), "speed"),
        (("127.0.0.1:1", "here"), "weightEndpoint: .*expected HOST:PORT"),
        (("run: grpo", "run: a/b"), "run"),
        (("run: grpo", ""), "run and weightEndpoint go together"),
        (("name:", ": ["), "dedicated.yaml"),
        (("maxRunning: 3", f"{ROUTED}\ndrafts: true"), "enable-return-routed-experts"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, change: tuple[str, str], text: str
) -> None:
    file = tmp_path / "dedicated.yaml"
    file.write_text(FILE.replace(*change))
    with pytest.raises(BadInput, match=text):
        DedicatedFile.load(file)
    with pytest.raises(BadInput, match=r"missing\.yaml"):
        DedicatedFile.load(tmp_path / "missing.yaml")


PAGE = Path(__file__).parents[2] / "docs" / "engine-host.md"


def test_the_file_and_the_command_that_the_page_shows_are_understood() -> None:
    (text,) = re.findall(r"```yaml\n(# engine\.yaml\n.*?)```", PAGE.read_text(), re.DOTALL)
    order = DedicatedFile.model_validate(yaml.safe_load(text)).order()
    assert (order.engine.model, order.gpu_uuids) == ("qwen3-8b", ("GPU-6d9c1b5e",))
    (command,) = re.findall(
        r"\$ rose engine-host (--rundir.*?--dedicated.*?)\n\$ ", PAGE.read_text(), re.DOTALL
    )
    given = parser().parse_args(shlex.split(command.replace("\\\n", " ")))
    assert (str(given.dedicated), given.lease) == ("engine.yaml", "research/grpo")
    assert encrypts(given)


@pytest.mark.parametrize(
    ("words", "encrypted"),
    [
        (("--router", "tls://router:7444"), True),
        (("--router", "router:7444"), False),
        (("--router", "tls://router:7444", "--no-data-tls"), False),
        (("--router", "router:7444", "--data-tls"), True),
        ((), False),
    ],
)
def test_turns_are_encrypted_where_the_router_hears_of_the_certificate(
    words: tuple[str, ...], encrypted: bool
) -> None:
    assert encrypts(parser().parse_args(words)) == encrypted


async def test_a_router_is_told_of_the_certificate_that_the_data_route_shows(
    rundir: Path, models: Path
) -> None:
    router = Router("install")
    address = await router.start()
    async with started(rundir, models, address, more=("--data-tls",)):
        update = await router.until("gate_open", True)
        url = URL(update.url)
        assert url.scheme == "https"
        place = str(url.host), int(url.port or 0)
        shown = await asyncio.to_thread(ssl.get_server_certificate, place)
        assert update.certificates == (certificates.fingerprint(shown.encode()),)
    await router.stop()
