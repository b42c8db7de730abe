"""Harbor's own program runs a task directory as it is in a sandbox: ``make sandbox-harbor``."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rose_sandbox.host import Host
from rose_sandbox.http import ServingTraffic, application
from rose_sandbox.inspector.inspector import BlindInspector
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_weights.store.records import OwnedSession, Records
from rose_weights.store.store import Store

pytestmark = pytest.mark.sandbox

CACHE = Path(os.environ.get("ROSE_CACHE") or Path.home() / ".cache" / "rose")
HARBOR = CACHE / "harbor" / "bin" / "harbor"
CHECKOUT = Path(__file__).parents[2]
# What is tested is this checkout, whichever one Harbor's environment was made from.
PACKAGES = [str(CHECKOUT / name) for name in ("sandbox", "weights", "wire", "")]
TASK = {
    "task.toml": 'version = "1.0"\n[environment]\ncpus = 1\nmemory_mb = 512\n',
    "instruction.md": "Write the sum of numbers.txt to /app/sum.txt.\n",
    "environment/Dockerfile": (
        "FROM python:3.12-slim\nENV UNIT=euro\nWORKDIR /app\nCOPY numbers.txt .\n"
        "RUN wc -l < numbers.txt > /lines\n"
    ),
    "environment/numbers.txt": "3\n4\n5\n",
    "solution/solve.sh": (
        '#!/bin/bash\npwd > /where\necho "$(paste -sd+ numbers.txt | python3 -c '
        "'print(eval(input()))') $UNIT\" > sum.txt\n"
    ),
    "tests/test.sh": (
        "#!/bin/bash\n"
        'if [ "$(cat /app/sum.txt) $(cat /lines) $(cat /where)" = "12 euro 3 /app" ]; then '
        "echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    ),
}


class NotedRecords(Records):
    """Records that say whose there were."""

    sessions: tuple[str, ...] = ()

    def claim(self, session: str, owner: str, expected_fence: int | None = None) -> OwnedSession:
        """See ``Records``."""
        self.sessions = (*self.sessions, session)
        return super().claim(session, owner, expected_fence)


@pytest.fixture
async def served(
    runc: RuncRuntime, tmp_path: Path
) -> AsyncIterator[tuple[Host, str, NotedRecords]]:
    """A host of real sandboxes, its address and its records."""
    records = NotedRecords(Store(tmp_path / "store"), "grpo")
    host = Host(runc, BlindInspector("a test"), records, owner="one", scratch=tmp_path / "parts")
    runner = web.AppRunner(application(host, ServingTraffic(), lambda: "word"))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield host, f"http://127.0.0.1:{runner.addresses[0][1]}", records
    await runner.cleanup()
    for session in host.sessions():
        await host.end(session, forget=True)
    await host.close()


async def played(url: str, tmp_path: Path, written: dict[str, str], *words: str) -> str:
    """A trial of Harbor's own program in ``played``; what it said."""
    if not HARBOR.exists():
        pytest.skip("Harbor is not installed; make sandbox-harbor")
    task = tmp_path / "sum"
    for name, text in written.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(HARBOR, "trial", "start", "--path", task, "--trials-dir", tmp_path),
        *("--trial-name", "played", *words),
        *("--env", "rose_sandbox.adapters.harbor:RoseEnvironment"),
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME")},
            "ROSE_SANDBOX_URL": url,
            "ROSE_SANDBOX_TOKEN": "word",
            "HARBOR_TELEMETRY": "0",
            "PYTHONPATH": os.pathsep.join(PACKAGES),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize(
    ("agent", "reward", "after"), [("oracle", 1.0, "--delete"), ("nop", 0.0, "--no-delete")]
)
async def test_harbor_plays_a_task_directory_as_it_is(
    served: tuple[Host, str, NotedRecords],
    tmp_path: Path,
    agent: str,
    reward: float,
    after: str,
) -> None:
    host, url, records = served
    await played(url, tmp_path, TASK, "--agent", agent, after)
    answer = json.loads((tmp_path / "played" / "result.json").read_text())
    assert answer["exception_info"] is None, answer["exception_info"]
    assert answer["verifier_result"]["rewards"] == {"reward": reward}
    assert host.sessions() == (), "ended with the trial"
    kept = [records.turns(session) for session in records.sessions]
    assert bool(kept[0]) is (after == "--no-delete"), "what is not deleted can be restored"


async def test_a_sandbox_that_cannot_be_saved_ends_with_its_trial(
    served: tuple[Host, str, NotedRecords], tmp_path: Path
) -> None:
    """Its environment knew it no more, and it ran on."""
    host, url, records = served
    # A deleted file over CRIU's limit, still open.
    hold = (
        "RUN head -c 70M /dev/zero > /x; (rm /x; exec sleep 1000) < /x > /dev/null 2>&1 & "
        "while [ -e /x ]; do sleep 0.05; done\n"
    )
    written = TASK | {"environment/Dockerfile": TASK["environment/Dockerfile"] + hold}
    await played(url, tmp_path, written, "--agent", "nop", "--no-delete")
    assert len(records.sessions) == 1
    assert host.sessions() == ()
