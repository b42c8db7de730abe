"""A runtime of verifiers (0.4) on a sandbox; ``Agent.run(runtime=...)`` takes it.

    runtime = RoseRuntime(RoseConfig(session="episode-7", url="http://sandboxes:7600"), token="...")
    await runtime.start()
    await runtime.run(["pytest", "-q"], {})
    await runtime.stop()

| of verifiers | here |
|---|---|
| ``run_background`` | a job of the sandbox, saved with it |
| a program that calls the model | runs outside, or the host has ``--egress`` for the model |
| ``expose``, ``open_process`` | refused: a sandbox has no address of its own |
"""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from typing import ClassVar, Literal

from pydantic_config import BaseConfig
from verifiers.v1.errors import SandboxError as VerifiersError
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime

from rose_sandbox.adapters.shells import command_of
from rose_sandbox.client import Sandbox
from rose_sandbox.errors import BadPath, SandboxError
from rose_sandbox.host import COMMAND_SECONDS

__all__ = ["RoseConfig", "RoseRuntime", "RoseRuntimeInfo"]


class RoseConfig(BaseConfig):  # type: ignore[misc]  # verifiers says nothing of types
    """What a runtime is made of; the rest as in ``Sandbox``."""

    type: Literal["rose"] = "rose"
    session: str = ""
    url: str = ""
    image: str = "base"
    folder: str = "/home"
    seconds: float = COMMAND_SECONDS


class RoseRuntimeInfo(RoseConfig, BaseRuntimeInfo):  # type: ignore[misc]  # as above
    """The same, with the sandbox's session as ``id``."""


class RoseRuntime(Runtime):  # type: ignore[misc]  # as above
    """Verifiers' runtime over a sandbox.

    Args:
        config: which.
        token: of the host.
        name: of the runtime in verifiers' logs.
        box: one that has begun, such as a child of a fork; ``stop`` leaves it.
    """

    is_local: bool = False
    supports_user: ClassVar[bool] = False

    def __init__(
        self,
        config: RoseConfig,
        *,
        token: str = "",
        name: str | None = None,
        box: Sandbox | None = None,
    ) -> None:
        super().__init__(name)
        self.config = config
        self.info = RoseRuntimeInfo(**config.model_dump())
        self._token, self._given, self._box = token, box, box

    async def start(self) -> None:
        """Start a sandbox.

        Raises:
            SandboxError: of verifiers; the text says what the host said.
        """
        if self._box is None:
            config = self.config
            box = Sandbox(
                session=config.session,
                url=config.url,
                token=self._token,
                image=config.image,
                folder=config.folder,
            )
            try:
                await box.__aenter__()
            except SandboxError as error:
                raise VerifiersError(str(error)) from error
            self._box = box
        self.info.id = self._box.session

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a program in the working folder."""
        text = command_of(argv, folder=self.config.folder, environment=self.process_env(env))
        try:
            made = await self._there.run(text, self.config.seconds, shell=None)
        except SandboxError as error:
            raise VerifiersError(str(error)) from error
        return ProgramResult(
            made.exit_code,
            made.stdout.decode(errors="replace"),
            made.stderr.decode(errors="replace"),
        )

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a program that runs until the sandbox ends."""
        text = command_of(argv, environment=self.process_env(env))
        place = shlex.quote(str(self._path(log)))
        job = f"cd {shlex.quote(self.config.folder)} && setsid {text} >{place} 2>&1 </dev/null &"
        try:
            await self._there.run(job, self.config.seconds, shell=None)
        except SandboxError as error:
            raise VerifiersError(str(error)) from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, with its folders."""
        there = self._path(path)
        try:
            await self._there.run(command_of(("mkdir", "-p", str(there.parent))), shell=None)
            await self._there.write(str(there), data)
        except SandboxError as error:
            raise VerifiersError(f"write {path!r}: {error}") from error

    async def expose(self, port: int) -> str:
        """Refused."""
        raise VerifiersError(
            f"port {port} of a sandbox has no address of its own; the host's "
            f"/sessions/{{key}}/port/{port}/ reaches it with its token"
        )

    async def teardown(self) -> None:
        """End the sandbox, unless it was given."""
        box, self._box = self._box, None
        if box is not None and box is not self._given:
            await box.__aexit__(None, None, None)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            read: bytes = await super()._read(str(self._path(path)), max_bytes)
            return read
        try:
            return await self._there.read(str(self._path(path)))
        except (BadPath, SandboxError) as error:
            raise VerifiersError(f"read {path!r}: {error}") from error

    def _path(self, path: str) -> PurePosixPath:
        return PurePosixPath(self.config.folder) / path

    @property
    def _there(self) -> Sandbox:
        if self._box is None:
            raise VerifiersError("the runtime has not been started")
        return self._box
