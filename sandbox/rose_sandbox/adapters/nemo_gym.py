"""A provider of sandboxes for NeMo Gym (0.4): the name ``rose`` in its configuration.

    box = AsyncSandbox({"rose": {"url": "http://sandboxes:7600", "token": "..."}}, spec)

NeMo Gym finds it by the entry point ``nemo_gym.sandbox_providers`` of ROSE's package. ``url`` and
``token`` are those of the environment by default.

| of a spec | here |
|---|---|
| ``image`` | the name of a host's image |
| ``resources`` | limits of the sandbox; GPUs are refused |
| ``workdir``, ``env``, ``files`` | as they are |
| ``entrypoint`` | refused: a first process is ROSE's; ``exec`` starts what ought to run |
| ``ttl_s`` | not kept: a sandbox lives until it is closed |
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
)

from rose_sandbox.adapters.shells import command_of
from rose_sandbox.client import Sandbox
from rose_sandbox.errors import BadPath, SandboxError, UnknownSandbox
from rose_sandbox.host import COMMAND_SECONDS
from rose_sandbox.runtimes.runtime import Limits

__all__ = ["RoseProvider"]

_FAILED = 125
"""No exit code of a command: what NeMo Gym's own providers say then."""


class RoseProvider:
    """NeMo Gym's provider over a host.

    Args:
        url, token: of the host; by default what the environment says.
        image: of specs that name none.
    """

    name = "rose"

    def __init__(self, url: str = "", token: str = "", image: str = "base") -> None:
        self._url, self._token, self._image = url, token, image

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox.

        Raises:
            SandboxCreateError: what cannot be had, or what the host said.
        """
        if spec.entrypoint:
            raise SandboxCreateError("entrypoint: start it by exec; a first process is ROSE's own")
        box = Sandbox(
            url=self._url,
            token=self._token,
            image=spec.image or self._image,
            limits=_limits(spec.resources),
            environment=spec.env,
            folder=spec.workdir or "/home",
        )
        try:
            await box.__aenter__()
        except SandboxError as error:
            raise SandboxCreateError(str(error)) from error
        return SandboxHandle(box.session, self.name, box)

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command in a fresh shell."""
        text = f"bash -c {shlex.quote(command)}"
        if user not in {None, "root", 0, "0"}:
            text = f"runuser -u {shlex.quote(str(user))} -- {text}"
        text = command_of(text, folder=cwd, environment=env)
        try:
            made = await _box(handle).run(text, float(timeout_s or COMMAND_SECONDS), shell=None)
        except SandboxError as error:
            return SandboxExecResult(None, str(error), _FAILED, "sandbox")
        return SandboxExecResult(
            made.stdout.decode(errors="replace"),
            made.stderr.decode(errors="replace"),
            made.exit_code,
            "timeout" if made.timed_out else None,
        )

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """A file into the sandbox, with the folders above it."""
        data = await asyncio.to_thread(source_path.read_bytes)
        await _box(handle).write(target_path, data)

    async def download_file(
        self, handle: SandboxHandle, source_path: str, target_path: Path
    ) -> None:
        """A file of the sandbox.

        Raises:
            FileNotFoundError: it is not there.
        """
        try:
            data = await _box(handle).read(source_path)
        except BadPath as error:
            raise FileNotFoundError(str(error)) from error
        target_path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target_path.write_bytes, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Whether it runs; one that sleeps is woken, and runs."""
        try:
            await _box(handle).run("true", shell=None)
        except UnknownSandbox:
            return SandboxStatus.STOPPED
        except SandboxError:
            return SandboxStatus.UNKNOWN
        return SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """End it, and its records."""
        await _box(handle).__aexit__(None, None, None)

    async def aclose(self) -> None:
        """Nothing is shared by sandboxes."""


def _box(handle: SandboxHandle) -> Sandbox:
    if not isinstance(handle.raw, Sandbox):
        raise TypeError(f"{handle.sandbox_id} is a sandbox of {handle.provider_name}, not of ROSE")
    return handle.raw


def _limits(asked: SandboxResources) -> Limits:
    if asked.gpu:
        raise SandboxCreateError(f"{asked.gpu} GPUs are asked for, and a sandbox has none")
    usual = Limits()
    return Limits(
        asked.cpu or usual.cpus,
        (asked.memory_mib or 0) << 20 or usual.memory_bytes,
        usual.pids,
        (asked.disk_gib or 0) << 30 or usual.disk_bytes,
    )
