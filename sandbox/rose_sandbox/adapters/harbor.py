"""Task directories of Harbor (0.25) as they are, in sandboxes: an environment for its trials.

    harbor trial start -p TASK -a AGENT -e rose_sandbox.adapters.harbor:RoseEnvironment

The host is ``ROSE_SANDBOX_URL`` with ``ROSE_SANDBOX_TOKEN``. A trial's session has Harbor's name.

| of a task | here |
|---|---|
| ``docker_image`` | the name of a host's image; Harbor puts the files of ``environment`` there |
| ``environment/Dockerfile`` | played (``dockerfile``) in ``base`` or what ``image=`` names |
| network | what the host's ``--egress`` allows, and no more |
| GPUs, Windows, compose files | refused by Harbor, for this says that it has none |
"""

from __future__ import annotations

import io
import shlex
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from rose_sandbox.adapters.dockerfile import Plan, plan
from rose_sandbox.adapters.shells import command_of
from rose_sandbox.client import Sandbox
from rose_sandbox.errors import BadPath
from rose_sandbox.host import COMMAND_SECONDS
from rose_sandbox.runtimes.runtime import Limits

__all__ = ["RoseEnvironment"]

_MIB = 1 << 20
_ARCHIVE = "/tmp/.rose-transfer.tar"  # noqa: S108 - in the sandbox, which nobody else is in


class RoseEnvironment(BaseEnvironment):  # type: ignore[misc]  # harbor is in an environment of its own
    """Harbor's environment over a sandbox; arguments as of ``BaseEnvironment``, and these.

    Args:
        image: that Dockerfiles are played in.
        url, token: of a host; by default what the environment says.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - Harbor's
        image: str = "base",
        url: str = "",
        token: str = "",
        **more: Any,  # noqa: ANN401 - Harbor's
    ) -> None:
        self._image, self._url, self._token = image, url, token
        self._box: Sandbox | None = None
        self._plan = Plan()
        super().__init__(*arguments, **more)

    @staticmethod
    def type() -> str:
        """The name in Harbor's results."""
        return "rose"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """A sandbox has no network but what its host allows."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        file = self.environment_dir / "Dockerfile"
        if self.task_env_config.docker_image is None and file.exists():
            self._plan = plan(file.read_text())

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 - nothing is built
        """Start a sandbox, and play the task's Dockerfile in it.

        Raises:
            RuntimeError: a step of it fails.
        """
        usual = Limits()
        limits = Limits(
            self._effective_cpus or usual.cpus,
            (self._effective_memory_mb or 0) * _MIB or usual.memory_bytes,
            usual.pids,
            (self._effective_storage_mb or 0) * _MIB or usual.disk_bytes,
        )
        box = Sandbox(
            session=self.session_id,
            image=self.task_env_config.docker_image or self._image,
            limits=limits,
            environment={**self._plan.environment, **self._startup_env()},
            url=self._url,
            token=self._token,
        )
        self._box = await box.__aenter__()
        for step in self._plan.steps:
            await self._made(f"mkdir -p {shlex.quote(step.folder)}")
            if step.copies:
                await self._copy(step.copies, step.target)
            else:
                await self._made(f"cd {shlex.quote(step.folder)} && {step.command}")
        await self._upload_environment_dir_after_start()
        await self.ensure_dirs(self._mount_targets(writable_only=True))

    async def stop(self, delete: bool) -> None:
        """End the sandbox; without ``delete`` it is saved, and its records bring it back."""
        box, self._box = self._box, None
        if box is None:
            return
        try:
            if not delete:
                await box.checkpoint()
        finally:  # one that cannot be saved would run for ever
            # Left by an error, it keeps its records.
            await box.__aexit__(None if delete else Exception, None, None)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in a fresh shell."""
        command = f"bash -c {shlex.quote(command)}"  # as Harbor's own environments do
        who = self._resolve_user(user)
        if who not in {None, "root", 0, "0"}:
            command = f"runuser -u {shlex.quote(str(who))} -- {command}"
        folder = cwd or self.task_env_config.workdir or self._plan.folder
        text = command_of(command, folder=folder, environment=self._merge_env(env))
        made = await self._there.run(text, float(timeout_sec or COMMAND_SECONDS), shell=None)
        return ExecResult(
            stdout=made.stdout.decode(errors="replace"),
            stderr=made.stderr.decode(errors="replace"),
            return_code=made.exit_code,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """A file into the sandbox, with the folders above it."""
        await self._there.write(target_path, *_read(Path(source_path)))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """A folder's content into the sandbox, with modes and links."""
        await self._there.write(_ARCHIVE, _packed(Path(source_dir)))
        into = shlex.quote(target_dir)
        await self._made(
            f"mkdir -p {into} && "
            f"tar -xf {_ARCHIVE} -C {into} --no-same-owner --no-overwrite-dir; "
            f"code=$?; rm {_ARCHIVE}; exit $code"
        )

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """A file of the sandbox.

        Raises:
            FileNotFoundError: it is not there.
        """
        try:
            data = await self._there.read(source_path)
        except BadPath as error:
            raise FileNotFoundError(str(error)) from error
        _write(Path(target_path), data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """A folder's content of the sandbox.

        Raises:
            RuntimeError: it is not there.
            tarfile.FilterError: something in it would land elsewhere.
        """
        await self._made(f"tar -cf {_ARCHIVE} -C {shlex.quote(source_dir)} .")
        packed = await self._there.read(_ARCHIVE)
        await self._made(f"rm {_ARCHIVE}")
        _unpack(packed, Path(target_dir))

    async def _copy(self, names: tuple[str, ...], target: str) -> None:
        several = len(names) > 1 or target.endswith("/")
        for name in names:
            source = self.environment_dir / name
            if not source.exists() or not source.resolve().is_relative_to(
                self.environment_dir.resolve()
            ):
                raise FileNotFoundError(f"COPY {name}: it is not in {self.environment_dir}")
            if source.is_dir():
                await self.upload_dir(source, target)
            else:
                inside = str(PurePosixPath(target) / source.name) if several else target
                await self.upload_file(source, inside)

    async def _made(self, command: str) -> None:
        made = await self._there.run(command, COMMAND_SECONDS, shell=None)
        if made.exit_code:
            output = (made.stderr or made.stdout).decode(errors="replace")[-500:]
            raise RuntimeError(
                f"exit code {made.exit_code} in the sandbox from {command}: {output}"
            )

    @property
    def _there(self) -> Sandbox:
        if self._box is None:
            raise RuntimeError("the environment has not been started")
        return self._box


def _read(file: Path) -> tuple[bytes, int]:
    return file.read_bytes(), file.stat().st_mode & 0o777


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
