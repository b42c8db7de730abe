"""A container provider for OpenEnv (0.10): an environment's server runs in a sandbox.

    provider = RoseProvider(url="http://sandboxes:7600", token="...")
    env = await EchoEnv.from_docker_image("echo-env", provider=provider)

``url`` and ``token`` are those of the environment by default. OpenEnv's client is blocking or
asynchronous and speaks HTTP and WebSockets to an address, so the provider lives in a thread of its
own and opens a forwarder on this machine (``openenv_forward``).

| OpenEnv's | here |
|---|---|
| ``image`` | the name of a host's image, with ``/app`` as OpenEnv's Dockerfiles make it |
| ``project=`` | a folder as ``openenv init`` makes it; copied to ``/app/env`` |
| ``port`` | of the forwarder; in the sandbox it is 8000 |
| ``env_vars`` | of the sandbox |
| ``cmd=`` | starts the server; by default ``app`` of ``openenv.yaml``, by uvicorn |

An episode lives as long as its records. Each answer of the environment begins a turn, which is
saved while the agent thinks; with ``router`` it is the router that says so. When the sandbox's host
is lost, the next action finds the sandbox again: at ``url`` or ``others``, or where the router puts
it. The client's connection stays, and what it was told stays true, or it ends and says why.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import logging
import secrets
import shlex
import socket
import tarfile
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import yaml
from openenv.core.containers.runtime.providers import ContainerProvider

from rose_core.sandboxes.conversations import ConversationLost
from rose_core.sandboxes.outside import EffectsCrossed
from rose_sandbox.adapters.openenv_forward import AGAIN_SECONDS, Forwarder, Way
from rose_sandbox.client import RemoteHost, Sandbox, sandbox_address
from rose_sandbox.errors import (
    CannotRestore,
    HostAway,
    SandboxError,
    TooManyTunnels,
    UnknownSandbox,
    UnknownTurn,
)
from rose_sandbox.runtimes.runtime import Limits
from rose_weights.errors import Fenced

__all__ = ["RoseProvider"]

LOG = logging.getLogger(__name__)

PORT, BESIDE = 8000, 7998
READY_SECONDS = 120.0
"""For a server that imports all that OpenEnv's needs, on a busy machine."""
LOST_SECONDS = 60.0
"""Twice what a host on another node takes to give back the largest sandbox of the benchmarks."""
_SECONDS = 60.0
_AT = "/var/lib/rose"
_LOG, _PIDS = f"{_AT}/openenv.log", f"{_AT}/openenv.pids"
_T = TypeVar("_T")


class RoseProvider(ContainerProvider):  # type: ignore[misc]  # openenv is in an environment of its own
    """One environment in one sandbox.

    Args:
        image: where ``start_container`` names none.
        project: a folder with an environment, copied into the sandbox.
        cmd: of the server.
        env_vars: where ``start_container`` names none.
        limits: of the sandbox.
        session: of the episode, as at the router; made up where none is given.
        url, token: of a host, or of several by one name; by default what the environment says.
        others: hosts with the same store, which may give the sandbox back too.
        router, router_token: where the session's turns are sampled: it says when to save, and where
            a sandbox is given back.
    """

    def __init__(
        self,
        *,
        image: str = "base",
        project: Path | str | None = None,
        cmd: str = "",
        env_vars: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        session: str = "",
        url: str = "",
        token: str = "",
        others: Sequence[str] = (),
        router: str = "",
        router_token: str = "",
    ) -> None:
        self.session = session or uuid.uuid4().hex
        self._image, self._cmd, self._limits = image, cmd, limits
        self._project = Path(project) if project is not None else None
        self._environment = dict(env_vars or {})
        self._named, self._token = sandbox_address(url, token)
        self._url = self._named  # one of its hosts, once that is known
        self._others = tuple(others)
        self._router, self._router_token = router, router_token
        self._thread: _Thread | None = None
        self._box: Sandbox | None = None
        self._forwarder: Forwarder | None = None
        self._finding = asyncio.Lock()

    # -- OpenEnv's -------------------------------------------------------------------------------

    def start_container(
        self,
        image: str | None = None,
        port: int | None = None,
        env_vars: dict[str, str] | None = None,
        **more: Any,  # noqa: ANN401 - OpenEnv's
    ) -> str:
        """Start a sandbox and the server in it; returns the address of its forwarder.

        Args:
            image: of the host.
            port: of the forwarder; None: a free one.
            env_vars: of the sandbox.
            more: ``cmd`` and ``project``, as of the provider.

        Raises:
            ValueError: another key in ``more``.
            RuntimeError: it cannot be started; the text says why.
        """
        if self._thread is not None:
            raise RuntimeError(
                "this provider has started its environment; stop it, or take another"
            )
        cmd = str(more.pop("cmd", "") or self._cmd)
        given = more.pop("project", None) or self._project
        if more:
            raise ValueError(f"{', '.join(sorted(more))}: RoseProvider takes cmd and project")
        self._thread = _Thread(f"openenv-{self.session}")
        environment = self._environment if env_vars is None else env_vars
        try:
            made = self._thread.run(
                self._start(image or self._image, port or 0, environment, cmd, given)
            )
        except (SandboxError, OSError) as error:
            self.stop_container()
            raise RuntimeError(f"the environment cannot be started: {error}") from error
        except BaseException:  # also when interrupted: nobody would stop it
            self.stop_container()
            raise
        return f"http://127.0.0.1:{made}"

    def wait_for_ready(self, base_url: str, timeout_s: float = READY_SECONDS) -> None:
        """Return when the server answers and can be given back.

        Raises:
            TimeoutError: it does not answer in time.
            RuntimeError: it has ended; the text has its last words.
        """
        self._started.run(self._wait(base_url, timeout_s))

    def stop_container(self) -> None:
        """End the sandbox and its records, and shut the forwarder. Stopped is no error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.run(self._stop())
        finally:
            thread.end()

    def close(self) -> None:
        """End the sandbox: ``stop_container`` by another name."""
        self.stop_container()

    # -- beyond it -------------------------------------------------------------------------------

    def checkpoint(self, ids: Sequence[int] = ()) -> int:
        """Make this moment recoverable, with the token ids that led to it; returns its turn."""
        return self._started.run(self._here.checkpoint(ids)).turn

    @property
    def box(self) -> Sandbox:
        """The sandbox, whose calls belong to the provider's thread: see ``call``."""
        return self._here

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of ``box`` in the provider's thread."""
        return self._started.run(work)

    @property
    def _started(self) -> _Thread:
        if self._thread is None:
            raise RuntimeError("no environment has been started")
        return self._thread

    @property
    def _here(self) -> Sandbox:
        if self._box is None:
            raise RuntimeError("no environment has been started")
        return self._box

    # -- in the thread ---------------------------------------------------------------------------

    async def _start(
        self,
        image: str,
        port: int,
        environment: Mapping[str, str],
        cmd: str,
        project: Path | str | None,
    ) -> int:
        self._finding = asyncio.Lock()
        if self._url:
            self._url = secrets.choice(await _each(self._url))
        box = Sandbox(
            session=self.session,
            image=image,
            limits=self._limits,
            environment=environment,
            folder="/",
            url=self._url,
            token=self._token,
        )
        self._box = await box.__aenter__()
        if project is not None:
            await _copy(box, Path(project))
        await self._serve(box, cmd or await _command(box))
        way = Way(
            server=lambda: self._reach(PORT),
            beside=lambda: self._reach(BESIDE),
            answered=self._answered,
            asked=self._asked,
            seconds=LOST_SECONDS,
        )
        self._forwarder = Forwarder(way)
        return await self._forwarder.open(port)

    async def _serve(self, box: Sandbox, cmd: str) -> None:
        spec = importlib.util.find_spec("rose_sandbox.adapters.openenv_inside")
        if spec is None or spec.origin is None:
            raise RuntimeError("rose_sandbox.adapters.openenv_inside has no file")
        beside = f"{_AT}/openenv_inside.py"
        await box.write(beside, await asyncio.to_thread(Path(spec.origin).read_bytes))
        programs = (cmd, f'exec "$python" {beside} {BESIDE} {PORT}')
        started = [
            "PATH=/app/.venv/bin:$PATH; python=$(command -v python || command -v python3)",
            f"export PATH python; : >{_LOG}; : >{_PIDS}",
            *(
                f"setsid sh -c {shlex.quote(one)} </dev/null >>{_LOG} 2>&1 & echo $! >>{_PIDS}"
                for one in programs
            ),
        ]
        made = await box.run("\n".join(started), _SECONDS, shell=None)
        if made.exit_code:
            raise RuntimeError(f"the server cannot be started: {made.stderr.decode()[-500:]}")

    async def _wait(self, base_url: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as http:
            while loop.time() < until:
                with suppress(aiohttp.ClientError, TimeoutError):
                    if await self._is_ready(http, base_url):
                        # From here on an episode can be given back.
                        await self._here.checkpoint()
                        return
                await self._check()
                await asyncio.sleep(AGAIN_SECONDS)
        raise TimeoutError(f"the environment at {base_url} was not ready in {seconds:g} s")

    async def _is_ready(self, http: aiohttp.ClientSession, base_url: str) -> bool:
        async with http.get(f"{base_url}/health") as answer:
            return answer.status == HTTPStatus.OK and await self._is_beside()

    async def _is_beside(self) -> bool:
        try:
            (await self._here.connect(BESIDE)).close()
        except SandboxError:
            return False
        return True

    async def _check(self) -> None:
        asked = f"while read -r pid; do kill -0 $pid || exit 9; done <{_PIDS}; tail -c 2000 {_LOG}"
        made = await self._here.run(asked, _SECONDS, shell=None)
        if made.exit_code == 9:
            log = await self._here.run(f"tail -c 2000 {_LOG}", _SECONDS, shell=None)
            raise RuntimeError(f"the server has ended:\n{log.stdout.decode(errors='replace')}")

    async def _stop(self) -> None:
        forwarder, self._forwarder = self._forwarder, None
        if forwarder is not None:
            await forwarder.close()
        box, self._box = self._box, None
        if box is None:
            return None
        try:
            await box.__aexit__(None, None, None)
        except (HostAway, Fenced):
            for url in {self._named: None, **dict.fromkeys(self._others), self._url: None}:
                far = RemoteHost(url, self._token)
                try:
                    return await far.end(self.session, forget=True)
                except (HostAway, Fenced) as error:
                    LOG.warning("the sandbox of %s is not ended: %s", self.session, error)
                finally:
                    await far.close()

    async def _answered(self) -> None:
        if not self._router:  # it says itself when turns begin and end
            await self._here.began()

    async def _asked(self) -> None:
        if not self._router:
            await self._here.ready()

    async def _reach(self, port: int) -> socket.socket:
        """A connection into the sandbox, wherever it is now.

        Raises:
            ConversationLost: it cannot be given back.
            SandboxError: no host answers, or nothing listens there.
        """
        before = self._here
        try:
            return await before.connect(port)
        except TooManyTunnels:
            raise
        except (HostAway, UnknownSandbox, Fenced) as error:
            if not self._url:
                raise
            LOG.warning("session %s is looked for: %s", self.session, error)
        async with self._finding:
            with suppress(HostAway, UnknownSandbox, Fenced):
                if self._here is not before:  # found meanwhile
                    return await self._here.connect(port)
            try:
                url = await (self._ask_router() if self._router else self._restore())
            except (EffectsCrossed, UnknownTurn, CannotRestore) as error:
                raise ConversationLost(f"it cannot be given back: {error}") from error
            await self._go_to(url)
            return await self._here.connect(port)

    async def _go_to(self, url: str) -> None:
        old, self._url = self._box, url
        self._box = await Sandbox(
            session=self.session, url=url, token=self._token, existing=True
        ).__aenter__()
        if old is not None:
            await old.leave()

    async def _restore(self) -> str:
        """Where it is, or the first host that gives it back."""
        places: dict[str, None] = {}
        for url in (self._url, self._named, *self._others):
            with suppress(HostAway):  # another name may have an address
                places |= dict.fromkeys(await _each(url))
        # Beside each other: those that are silent cost seconds once.
        present = dict(zip(places, await asyncio.gather(*map(self._has_it, places)), strict=True))
        for url in places:
            if present[url]:
                return url
        why: SandboxError = HostAway("no host answers")
        for url in places:
            if present[url] is None:
                continue
            far = RemoteHost(url, self._token)
            try:
                await far.restore(self.session)
            except HostAway as error:
                why = error
            else:
                return url
            finally:
                await far.close()
        raise why

    async def _has_it(self, url: str) -> bool | None:
        """Whether a host has the session; None: it does not answer."""
        far = RemoteHost(url, self._token)
        try:
            if not await far.answers():
                return None
            await far.state(self.session)
        except (HostAway, UnknownSandbox, Fenced):
            return False
        else:
            return True
        finally:
            await far.close()

    async def _ask_router(self) -> str:
        at = f"{self._router.rstrip('/')}/sessions/{self.session}/restore"
        headers = {"Authorization": f"Bearer {self._router_token}"} if self._router_token else {}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(at, json={}, timeout=aiohttp.ClientTimeout(total=LOST_SECONDS)) as answer,
            ):
                reply = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise HostAway(f"{self._router} does not answer: {error}") from error
        if not answer.ok:
            raise ConversationLost(f"the router does not give it back: {reply}")
        return str(reply["host"])


async def _each(url: str) -> list[str]:
    """Each host that a URL names: a name with several addresses is a host at each.

    Raises:
        HostAway: the name has no address.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return [url]  # a certificate is of the name
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostAway(f"{url} has no address: {error}") from error
    hosts = dict.fromkeys(f"[{at[0]}]" if ":" in str(at[0]) else at[0] for *_, at in found)
    return [parts._replace(netloc=f"{host}:{parts.port or 80}").geturl() for host in hosts]


async def _copy(box: Sandbox, project: Path) -> None:
    """A folder to ``/app/env``.

    Raises:
        RuntimeError: it is none.
    """
    if not (project / "openenv.yaml").is_file():
        raise RuntimeError(f"{project} has no openenv.yaml; openenv init makes such a folder")

    def packed() -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as out:
            out.add(project, arcname=".", filter=_wanted)
        return data.getvalue()

    await box.write(f"{_AT}/project.tar", await asyncio.to_thread(packed))
    made = await box.run(
        f"mkdir -p /app/env && tar -xf {_AT}/project.tar -C /app/env --no-same-owner && "
        f"rm {_AT}/project.tar",
        _SECONDS,
        shell=None,
    )
    if made.exit_code:
        raise RuntimeError(f"{project} cannot be copied: {made.stderr.decode()[-500:]}")


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    kept = not {".venv", ".git", "__pycache__"}.intersection(Path(info.name).parts)
    return info if kept else None


async def _command(box: Sandbox) -> str:
    """What starts the server of ``openenv.yaml``, which is where OpenEnv's Dockerfiles put it.

    Raises:
        RuntimeError: there is none, or it names no ``app``.
    """
    found = await box.run(
        "ls /app/env/openenv.yaml 2>/dev/null || "
        "find /app -maxdepth 4 -name openenv.yaml -print -quit 2>/dev/null",
        _SECONDS,
        shell=None,
    )
    path = found.stdout.decode().strip()
    if not path:
        raise RuntimeError("the image has no /app/env/openenv.yaml: name a command (cmd=)")
    settings = yaml.safe_load(await box.read(path))
    app = settings.get("app") if isinstance(settings, dict) else None
    if not isinstance(app, str):  # a file of a user
        raise RuntimeError(  # noqa: TRY004 - it is a user's
            f"{path} names no app: name a command (cmd=)"
        )
    root = path.rpartition("/")[0]
    return (
        f'cd {shlex.quote(root)} && exec "$python" -m uvicorn {shlex.quote(app)} '
        f"--host 127.0.0.1 --port {PORT}"
    )


class _Thread:
    """A loop in a thread of its own, for callers with another loop or none."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result; an interrupted caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # of one that has ended, nothing

    def end(self) -> None:
        """No work is left."""
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
