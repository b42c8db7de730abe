"""A runtime and a deployment of SWE-ReX (1.4) on sandboxes: SWE-agent's runs survive their host.

    deployment = RoseDeployment(session="episode-7", url="http://sandboxes:7600", token="...")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="make test"))

A bash session of SWE-ReX is a shell of the sandbox of that name, and is saved with it.

| of SWE-ReX | here |
|---|---|
| interactive programs (``is_interactive_command``, ``expect``) | refused: ``NotImplementedError`` |
| ``BashInterruptAction`` | refused: a command's limit ends it |
"""

from __future__ import annotations

import asyncio
import io
import logging
import tarfile
import uuid
from pathlib import Path
from typing import Any, Self

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from rose_sandbox.adapters.shells import command_of
from rose_sandbox.client import Sandbox
from rose_sandbox.errors import SandboxError
from rose_sandbox.host import COMMAND_SECONDS
from rose_sandbox.runtimes.runtime import ExecResult

__all__ = ["RoseDeployment", "RoseRuntime"]

_SYNTAX = 2
"""What a shell answers where it cannot read a command."""


class RoseRuntime(AbstractRuntime):  # type: ignore[misc]  # SWE-ReX says nothing of types
    """SWE-ReX's runtime over a sandbox that has begun.

    Args:
        box: the sandbox.
    """

    def __init__(self, box: Sandbox) -> None:
        self.logger = logging.getLogger(__name__)
        self._box = box
        self._shells: set[str] = set()

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109
        """Whether the sandbox runs commands."""
        try:
            made = await self._box.run("true", timeout or 10.0, shell=None)
        except SandboxError as error:
            return IsAliveResponse(is_alive=False, message=str(error))
        return IsAliveResponse(is_alive=made.exit_code == 0)

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """Begin a shell.

        Raises:
            SessionExistsError: there is one of that name.
        """
        if request.session in self._shells:
            raise SessionExistsError(f"session {request.session!r} already exists")
        sources = " && ".join(f". {one}" for one in request.startup_source)
        made = await self._box.run(sources or "true", shell=request.session)
        self._shells.add(request.session)
        return CreateBashSessionResponse(output=_text(made))

    async def run_in_session(self, action: Action) -> Observation:
        """Run a command in a shell that lives on.

        Raises:
            SessionDoesNotExistError, CommandTimeoutError, NonZeroExitCodeError,
            BashIncorrectSyntaxError: as SWE-ReX says.
        """
        if action.session not in self._shells:
            raise SessionDoesNotExistError(f"session {action.session!r} does not exist")
        if not isinstance(action, BashAction):
            raise NotImplementedError("interrupts: give the command a timeout instead")
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise NotImplementedError("interactive programs: run them by a script's stdin")
        made = await self._limited(action.command, action.timeout, shell=action.session)
        output = _text(made)
        if action.check == "raise" and made.exit_code:
            failure = f"Command {action.command!r} failed with exit code {made.exit_code}."
            message = f"{action.error_msg}: {failure}" if action.error_msg else failure
            if made.exit_code == _SYNTAX and "syntax error" in output:
                raise BashIncorrectSyntaxError(f"{message} Output:\n{output}")
            raise NonZeroExitCodeError(f"{message} Output:\n{output}")
        code = None if action.check == "ignore" else made.exit_code
        return BashObservation(output=output, exit_code=code)

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """End a shell.

        Raises:
            SessionDoesNotExistError: there is none of that name.
        """
        if request.session not in self._shells:
            raise SessionDoesNotExistError(f"session {request.session!r} does not exist")
        self._shells.remove(request.session)
        return CloseBashSessionResponse()

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command in a shell of its own.

        Raises:
            CommandTimeoutError, NonZeroExitCodeError: as SWE-ReX says.
        """
        text = command_of(command.command, folder=command.cwd, environment=command.env)
        made = await self._limited(text, command.timeout, shell=None)
        if command.check and made.exit_code:
            failure = f"Command {command.command!r} failed with exit code {made.exit_code}. {made}"
            message = f"{command.error_msg}: {failure}" if command.error_msg else failure
            raise NonZeroExitCodeError(message)
        out, err = made.stdout, made.stderr
        if command.merge_output_streams:
            out, err = out + err, b""
        return CommandResponse(
            stdout=out.decode(errors="backslashreplace"),
            stderr=err.decode(errors="backslashreplace"),
            exit_code=made.exit_code,
        )

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """A file's text."""
        data = await self._box.read(request.path)
        text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return ReadFileResponse(content=text)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a text."""
        await self._folder_of(request.path)
        await self._box.write(request.path, request.content.encode())
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or a folder of this machine."""
        await self._folder_of(request.target_path)
        data, mode = await asyncio.to_thread(_packed, Path(request.source_path))
        if mode is not None:
            await self._box.write(request.target_path, data, mode)
            return UploadResponse()
        there = f"/tmp/{uuid.uuid4().hex}.tar"  # noqa: S108 - the sandbox's
        await self._box.write(there, data)
        argv = ("mkdir", "-p", request.target_path)
        unpack = ("tar", "-xf", there, "-C", request.target_path, "--no-same-owner")
        text = f"{command_of(argv)} && {command_of(unpack)} && rm {there}"
        await self.execute(Command(command=text, shell=True, check=True))  # noqa: S604 - its own
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """Let go; the deployment ends the sandbox."""
        self._shells.clear()
        return CloseResponse()

    async def _limited(
        self, command: str, within: float | None, *, shell: str | None
    ) -> ExecResult:
        made = await self._box.run(command, within or COMMAND_SECONDS, shell=shell)
        if made.timed_out:
            raise CommandTimeoutError(f"{command!r} took over {within or COMMAND_SECONDS} s")
        return made

    async def _folder_of(self, path: str) -> None:
        folder = str(Path(path).parent)
        await self._box.run(command_of(("mkdir", "-p", folder)), shell=None)


class RoseDeployment(AbstractDeployment):  # type: ignore[misc]  # SWE-ReX says nothing of types
    """SWE-ReX's deployment: a sandbox from ``start`` to ``stop``.

    Args:
        sandbox: arguments of ``Sandbox``.
    """

    def __init__(self, **sandbox: Any) -> None:  # noqa: ANN401  # of ``Sandbox``
        self.logger = logging.getLogger(__name__)
        self._hooks = CombinedDeploymentHook()
        self._arguments = sandbox
        self._box: Sandbox | None = None
        self._runtime: RoseRuntime | None = None

    @classmethod
    def of(cls, box: Sandbox) -> Self:
        """Of a sandbox that has begun: a child of a fork. ``stop`` leaves it."""
        made = cls()
        made._runtime = RoseRuntime(box)
        return made

    def add_hook(self, hook: DeploymentHook) -> None:
        """See SWE-ReX."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109
        """Whether the sandbox runs commands."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Start a sandbox."""
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Starting sandbox")
        box = Sandbox(**self._arguments)
        await box.__aenter__()
        self._box, self._runtime = box, RoseRuntime(box)

    async def stop(self) -> None:
        """End it, with its records."""
        box, self._box, self._runtime = self._box, None, None
        if box is not None:
            await box.__aexit__(None, None, None)

    @property
    def runtime(self) -> RoseRuntime:
        """The runtime.

        Raises:
            DeploymentNotStartedError: ``start`` comes first.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


def _packed(source: Path) -> tuple[bytes, int | None]:
    """A file and its mode, or a folder as an archive."""
    if not source.is_dir():
        return source.read_bytes(), source.stat().st_mode & 0o777
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(source, arcname=".")
    return packed.getvalue(), None


def _text(made: ExecResult) -> str:
    return (made.stdout + made.stderr).decode(errors="backslashreplace").rstrip("\n")
