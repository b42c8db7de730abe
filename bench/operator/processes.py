"""Operators and agents as children, and what their pages and /proc say about them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.operator.agents import TOKEN, Event, Replaced
from bench.operator.fleet import SYSTEM, Fleet
from rose_dev.waiting import wait_for_answer

_BOUND = re.compile(r'le="([^"]+)"')

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Buckets:
    """Cumulative counts by upper bound, as a Prometheus histogram has them."""

    counts: Mapping[float, float]

    @classmethod
    def read(cls, samples: Mapping[str, float]) -> Buckets:
        """From the ``_bucket`` series of one histogram."""
        found = ((_BOUND.search(key), value) for key, value in samples.items())
        return cls({float(match[1]): value for match, value in found if match})

    def since(self, before: Buckets) -> Buckets:
        """What was added."""
        return Buckets({at: count - before.counts.get(at, 0) for at, count in self.counts.items()})

    def at_most(self, percent: float) -> float:
        """The quantile is not above this; infinite when the last bucket holds it."""
        total = max(self.counts.values(), default=0.0)
        bounds = sorted(self.counts)
        return next((at for at in bounds if self.counts[at] >= total * percent / 100), float("inf"))


class Operator:
    """``rose operator`` on one core.

    Args:
        core: the core it is bound to, None for any.
        profile: where ``dump_profile`` puts where its processor time went, None for no profiler.
    """

    def __init__(
        self,
        name: str,
        kubeconfig: Path,
        folder: Path,
        core: int | None,
        profile: Path | None = None,
    ) -> None:
        self.name, self.log, self.profile = name, folder / f"{name}.log", profile
        program = ["bench.operator.profiled", str(profile)] if profile else ["rose_cli.main"]
        (folder / "stores.yaml").write_text("main: store.example:7446\n")
        (folder / "token").write_text(TOKEN)
        command = [
            *(["taskset", "-c", str(core)] if core is not None else []),
            sys.executable,
            "-m",
            *program,
            "operator",
            f"--namespace={SYSTEM}",
            "--sync-address=127.0.0.1:0",
            "--http-port=0",
            "--router-image=rose:bench",
            f"--stores-file={folder / 'stores.yaml'}",
            f"--token-file={folder / 'token'}",
            "--settle-seconds=0",
            "--cool-seconds=5",
            "--toggle-seconds=1",
            f"--identity={name}",
            "--log-level=WARNING",
        ]
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        ports = wait_for_answer(self._ports, f"{name} tells its ports")
        self.sync_port, self.http_port = ports

    def _ports(self) -> tuple[int, int] | None:
        text = self.log.read_text()
        if self.process.poll() is not None:
            message = f"{self.name} ended with {self.process.returncode}:\n{text[-3000:]}"
            raise RuntimeError(message)
        for line in text.splitlines():
            if line.startswith("rose operator: sync="):
                sync, http = (int(part.split("=")[1]) for part in line.split()[2:4])
                return sync, http
        return None

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-2000:]

    def page(self, path: str) -> str:
        """A page, whatever its status."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:  # our own child
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()

    def leads(self) -> bool:
        """Whether it holds the lead."""
        return self.page("/readyz").strip() == "Leader"

    def samples(self, name: str) -> dict[str, float]:
        """Series of a metric, labels and all -> value."""
        pairs = (
            line.rsplit(" ", 1)
            for line in self.page("/metrics").splitlines()
            if line.startswith(name)
        )
        return {key: float(value) for key, value in pairs}

    def writes(self) -> float:
        """Write requests so far, the leader Lease's apart."""
        counts = self.samples("rose_operator_api_writes_total")
        return sum(count for key, count in counts.items() if 'kind="Lease"' not in key)

    def plans(self, what: str = "seconds") -> Buckets:
        """Times of planning so far; ``cpu_seconds`` is processor time."""
        return Buckets.read(self.samples(f"rose_operator_plan_{what}_bucket"))

    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def peak_bytes(self) -> int:
        """Most resident memory so far."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0

    def dump_profile(self) -> None:
        """Write the profile, if there is one."""
        if self.profile is not None:
            self.profile.unlink(missing_ok=True)
            self.process.send_signal(signal.SIGUSR2)
            wait_for_answer(self.profile.exists, f"{self.profile} is written", 60)

    def kill(self) -> None:
        """-9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


class Agents:
    """The agents' process, and what it has told; ``pods`` are the serving pods' uids by name."""

    def __init__(
        self, fleet: Fleet, addresses: Sequence[str], folder: Path, pods: Mapping[str, str]
    ) -> None:
        self.events: list[Event] = []
        file = folder / "pods.json"
        file.write_bytes(msgspec.json.encode(dict(pods)))
        with (folder / "agents.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.operator.agents",
                    msgspec.json.encode(fleet).decode(),
                    ",".join(addresses),
                    str(file),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Event)
        for line in self.process.stdout or ():
            self.events.append(decoder.decode(line))

    def replace(self, replaced: Replaced) -> None:
        """A serving pod was replaced; its node's agent sees it."""
        if self.process.stdin is None:
            raise RuntimeError("no pipe to the agents")
        self.process.stdin.write(msgspec.json.encode(replaced) + b"\n")
        self.process.stdin.flush()

    def granted(self) -> dict[str, Event]:
        """Slot -> its latest grant, of those that hold one."""
        held: dict[str, Event] = {}
        for event in list(self.events):
            if event.what == "granted":
                held[event.slot] = event
            elif event.what == "ended":
                held.pop(event.slot, None)
        return held

    def count(self, what: str, since: float = 0.0) -> int:
        """Events of a sort since a time."""
        return sum(event.what == what and event.at >= since for event in list(self.events))

    def stop(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        self.process.kill()
        self.process.wait()
        self._thread.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def ended(*children: Operator) -> Iterator[None]:
    """Operators are gone afterwards."""
    try:
        yield
    finally:
        for child in children:
            if child.process.poll() is None:
                child.kill()
