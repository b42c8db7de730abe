"""Sandbox hosts for programs: the host itself over HTTP, its runtime real or in this process."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from bench.sandboxes.own import own_gvisor, own_runtime
from rose_rewards import program_cases
from rose_rewards.functions import RewardFunction
from rose_rewards.programs import FOLDER
from rose_sandbox.errors import Unavailable, UnknownSandbox
from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.inspector import BlindInspector
from rose_sandbox.runtimes.fake import FakeRuntime
from rose_sandbox.runtimes.parts import GVISOR, PROGRAMS, find_parts
from rose_sandbox.runtimes.runtime import OUTPUT_BYTES, ExecResult, Handle, Runtime
from rose_weights.store.records import Records
from rose_weights.store.store import Store

TOKEN = "word-of-the-hosts"
_COMMAND = re.compile(rf"python3 -I {FOLDER}/inside\.py (\d+) (\d+) ([\d.]+)")
Ended = tuple[str, int, bytes]
"""How a case ends, its exit code, and what it prints."""


async def doubles(given: str) -> Ended:
    """A program that is right."""
    return "exited", 0, f"{int(given) * 2}\n".encode()


@dataclass
class PlayedRuntime(FakeRuntime):
    """Plays programs, which are functions of this process named in the program's text.

    It says of them what ``inside`` says, and stops where that does.
    """

    programs: dict[str, Callable[[str], Awaitable[Ended]]] = field(
        default_factory=lambda: {"doubles": doubles}
    )
    ran: list[tuple[str, int]] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    cpu: float = 0.01
    seconds: float = 0.01
    most: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    async def write_file(self, handle: Handle, path: str, data: bytes, mode: int = 0o644) -> None:
        self.received.append(data)
        await super().write_file(handle, path, data, mode)

    async def exec(
        self,
        handle: Handle,
        command: str,
        within: float,
        *,
        session: str | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> ExecResult:
        self.received.append(command.encode())
        asked = _COMMAND.fullmatch(command)
        if asked is None:
            return await super().exec(
                handle, command, within, session=session, output_bytes=output_bytes
            )
        self.most = max(self.most, len(self._worlds))
        name = (await self.read_file(handle, f"{FOLDER}/program.py")).decode().strip()
        job = json.loads(await self.read_file(handle, f"{FOLDER}/job.json"))
        self.commands.append(job["command"])
        said = program_cases.HELLO
        for number in range(int(asked[1]), int(asked[1]) + int(asked[2])):
            self.ran.append((name, number))
            end, code, gave = await self.programs[name](job["cases"][number])
            if handle.key not in self._worlds:
                raise UnknownSandbox("it has ended")
            took = {"seconds": self.seconds, "cpu": self.cpu}
            line = {"case": number, "end": end, "code": code, "bytes": len(gave), **took}
            said += json.dumps(line).encode() + b"\n" + gave
            if job["stop"] and (end, code) != ("exited", 0):
                break
        return ExecResult(0, said)

    def lose(self) -> None:
        """End every sandbox, as one whose memory is full does under gVisor."""
        self._worlds.clear()


@dataclass
class ProgramHost:
    """A host that answers at ``url``, and its clock."""

    host: Host
    records: Records
    url: str
    token: Path
    now: list[float]
    runner: web.AppRunner
    site: web.TCPSite

    def function(self, **more: object) -> RewardFunction:
        """A function of the platform's list whose programs run here."""
        return RewardFunction.model_validate(self.listed(**more))

    def listed(self, **more: object) -> dict[str, object]:
        """The same as it stands in the list."""
        return {"sandbox": self.url, "tokenFile": str(self.token), "caseSeconds": 2, **more}


@asynccontextmanager
async def program_host(
    folder: Path, runtime: Runtime, *, port: int = 0, egress: tuple[str, ...] = ()
) -> AsyncIterator[ProgramHost]:
    """A host over a runtime, whose sandboxes the caller ends."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    token, now = folder / "hosts-token", [0.0]
    token.write_text(TOKEN)
    records = Records(Store(folder / "records"), "programs")
    host = Host(
        runtime,
        BlindInspector("no turn of a program is saved"),
        records,
        owner="one",
        scratch=folder / "parts",
        egress=egress,
        clock=lambda: now[0],
    )
    runner = web.AppRunner(application(host, ServingTraffic(), lambda: TOKEN), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield ProgramHost(host, records, url, token, now, runner, site)
    finally:
        await runner.cleanup()
        await host.close()


@asynccontextmanager
async def real_host(
    folder: Path, kind: str = "runc", egress: tuple[str, ...] = ()
) -> AsyncIterator[ProgramHost]:
    """A host of real sandboxes, of which nothing is left; skips where this machine has none."""
    gvisor = kind == "runsc"
    try:
        parts = find_parts(GVISOR if gvisor else PROGRAMS)
    except Unavailable as error:
        pytest.skip(str(error))
    own = own_gvisor if gvisor else own_runtime
    async with (
        own(folder / "runtime", parts) as made,
        program_host(folder, made, egress=egress) as host,
    ):
        yield host
