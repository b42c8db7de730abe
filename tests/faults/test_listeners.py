"""Every verb of every port of every process, tried by each party: it opens to whom the table says.

The verbs are those that the real processes bind (``served``); the table is ``rose_core.rights``,
and a verb without a rule fails here. The same processes know secrets of ours; whatever they say of
themselves is searched for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from rose_core import rights
from rose_core.api.crd import KINDS
from rose_core.rights import CallerParty, Listener
from rose_dev.cluster.control_plane import ControlPlane
from rose_engines.process.exposed_routes import KEY_VARIABLE
from rose_rewards import keda
from rose_weights.serve import tenants
from tests.agent.node import SLOT, Node, node, tap_refusal
from tests.api.installed import install
from tests.faults import doors
from tests.operator.harness import OperatorProcess

pytestmark = pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "-")

ROOT = Path(__file__).parents[2]
ROSE = ("-m", "rose_cli.main")
# Listeners of each: pages, and where there is one a data route or gRPC.
PORTS = {"tap": 1, "agent": 1, "host": 2, "sync": 1, "store": 2, "relay": 2, "router": 2}
PORTS["ingest"] = 1
LISTENERS = {"host": Listener.HOST, "sync": Listener.SYNC}
LISTENERS |= {name: Listener(name) for name in PORTS.keys() - {"host", "sync"}}

# Each credential of the fleet, and where it makes its bearer somebody; elsewhere he is anybody.
WHO: dict[str, dict[Listener, tuple[CallerParty, ...]]] = {
    "": {},
    "guess": {},
    "installation": {
        Listener.AGENT: (CallerParty.NODE, CallerParty.PLATFORM),
        Listener.ROUTER: (CallerParty.NODE, CallerParty.OPERATOR),
        Listener.RELAY: (CallerParty.NODE,),
        Listener.STORE: (CallerParty.NODE,),
    },
    "turns": {Listener.ROUTER: (CallerParty.TRAINER,)},
    "harness": {Listener.ROUTER: (CallerParty.HARNESS,)},
    "store": {Listener.STORE: (CallerParty.TRAINER,)},
    "hosts": {Listener.STORE: (CallerParty.SANDBOX,)},
    "rival": {},
    "engine": {},
    "slot": {Listener.HOST: (CallerParty.ROUTER,)},
    "callers": {Listener.INGEST: (CallerParty.ROUTER,)},
}
# A team with rights to runs of its own reaches these too: blocks have no run, and are known by the
# hashes in the manifests of runs that it may read.
BLOCKS = {f"/rose.v1.Weights/{name}" for name in ("Fetch", "Missing", "Put")}


@dataclass
class Fleet:
    """Every process of ROSE but the operator, on one machine, each with secrets of its own."""

    node: Node
    words: dict[str, str] = field(default_factory=dict)

    def secret(self, name: str) -> str:
        """A file with a word that occurs nowhere else."""
        path = self.node.root / f"{name}.secret"
        if name not in self.words:
            self.words[name] = secrets.token_hex(16)
            path.write_text(self.words[name] + "\n")
        return str(path)

    def tenants(self) -> Path:
        """A store's file of tenants; the credential of its one tenant is the secret ``store``."""
        path = self.node.root / "tenants.json"
        own = ("team-*", "run")
        self.words["store"] = tenants.grant(path, "team", publish=own, read=own)
        self.words["hosts"] = tenants.grant(path, "hosts", record=own)
        (self.node.root / "store.secret").write_text(self.words["store"])
        self.words["rival"] = tenants.grant(path, "rival", publish=("rival-*",), read=("rival-*",))
        return path

    def keys(self) -> Path:
        """Public keys of a cluster whose accounts the router believes; signs a harness's token."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        path = self.node.root / "keys.json"
        path.write_bytes(msgspec.json.encode({"keys": [{**public, "kid": "k", "use": "sig"}]}))
        claims = {
            "sub": "system:serviceaccount:team:agents",
            "aud": ["rose-turns/team/run"],
            "exp": int(time.time()) + 3600,
        }
        self.words["harness"] = jwt.encode(claims, key, "RS256", headers={"kid": "k"})
        return path

    def served(self, name: str) -> set[str]:
        """What the process has bound, as it tells."""
        return set((self.node.root / f"{name}.served").read_text().split("\n")) - {""}

    def engines(self) -> set[int]:
        return {process.pid for process in self.node.engine_processes()}

    def learn(self) -> None:
        """What the engine's processes hold, and the token of their slot, which they do not."""
        known = [f"/proc/{pid}/environ" for pid in self.engines()]
        held = re.findall(rf"{KEY_VARIABLE}=(\w+)", "\0".join(read(path) for path in known))
        self.words["engine"] = held[0]
        order = self.node.root / "run" / "slots" / SLOT.uid / "slot.json"
        self.words["slot"] = msgspec.json.decode(order.read_bytes())["token"]

    def listeners(self, name: str) -> list[tuple[str, int]]:
        process = psutil.Process(self.node.processes[name].pid)
        children = {child.pid for child in process.children(recursive=True)}
        return doors.listeners({process.pid} | children - self.engines())

    async def start(self, name: str, *words: str) -> None:
        await self.node.spawn(name, *ROSE, *words)
        await self.ready(name)

    async def ready(self, name: str) -> None:
        await self.node.until(
            lambda: len(self.listeners(name)) == PORTS[name],
            f"{name} listens on {PORTS[name]}",
            seconds=300,
        )

    def port(self, name: str, text: str) -> str:
        """An address that a process tells in its log."""
        log = (self.node.root / f"{name}.log").read_text()
        return f"127.0.0.1:{log.split(text)[1].split(',')[0].split()[0]}"


@contextlib.asynccontextmanager
async def fleet(root: Path) -> AsyncIterator[Fleet]:
    installation = root / "installation.secret"
    installation.write_text(word := secrets.token_hex(16))
    flags = (f"--token-file={installation}", "--log-level=DEBUG")
    async with node(root, *flags, module="tests.faults.served") as parts:
        made = Fleet(parts, {"installation": word})
        run = f"--rundir={parts.root / 'run'}"
        mine = f"--token-file={installation}"
        anywhere = ("--http-port=0", "--log-level=DEBUG")
        await made.start("sync", "weight-sync", run, mine, *anywhere)
        place = (f"--root={root / 'store'}", "--address=127.0.0.1:0", *anywhere)
        await made.start("store", "weights", "serve", *place, mine, f"--tenants={made.tenants()}")
        store = made.port("store", "gRPC port ")
        (root / "checkpoints").mkdir()
        publishing = (f"--store={store}", "--run=run", f"--token-file={made.secret('store')}")
        asked = f"--caller-token-file={made.secret('callers')}"
        at = (f"--root={root / 'checkpoints'}", "--address=127.0.0.1:0")
        # It imports PyTorch, which takes longer than all others together.
        await made.node.spawn("ingest", *ROSE, "ingest", *publishing, *at, asked)
        place = (f"--root={root / 'relay'}", "--address=127.0.0.1:0", *anywhere)
        upstream = (f"--upstream={store}", f"--upstream-token-file={made.secret('store')}")
        await made.start("relay", "weights", "relay", *place, *upstream, mine)
        routing = ("--http-address=127.0.0.1:0", "--attach-address=127.0.0.1:0")
        turns = f"--turn-token-file={made.secret('turns')}"
        # Nobody is there: whoever may call reads that, which is more than a refusal.
        batches = "--batches=http://127.0.0.1:9"
        callers = (turns, f"--account-keys={made.keys()}", batches)
        await made.start(
            "router", "router", "--lease=team/run", *routing, mine, *callers, anywhere[1]
        )
        for name in ("tap", "host", "agent", "ingest"):
            await made.ready(name)
        await parts.until(parts.engine_processes, "an engine runs")
        made.learn()
        yield made


def private(path: Path, root: Path) -> bool:
    """Whether only its owner can connect to a Unix socket."""
    ways = [path, *(folder for folder in path.parents if folder.is_relative_to(root / "run"))]
    return any(stat.S_IMODE(way.stat().st_mode) & 0o077 == 0 for way in ways)


def sockets(found: Fleet) -> list[Path]:
    """Unix sockets in the folder of the test, by the processes that hold them."""
    pids = {process.pid for process in found.node.processes.values()} | found.engines()
    names = [
        str(one.laddr) for pid in pids for one in psutil.Process(pid).net_connections(kind="unix")
    ]
    return [path for name in names if (path := Path(name)).is_relative_to(found.node.root)]


def opened(name: str, word: str) -> set[str]:
    """What the table opens to the bearer of a credential at a process, over the network."""
    listener = LISTENERS[name]
    parties = WHO[word].get(listener, ()) or (CallerParty.ANYBODY,)
    return set().union(*(rights.allowed(listener, party) for party in parties))


async def response_to(
    found: Fleet, name: str, ports: list[int], word: str
) -> tuple[set[str], set[str], list[str]]:
    """Verbs of a process that the bearer may use, those that were tried, and what it read."""
    token = found.words.get(word, word)
    # Who shows nothing tries what is served elsewhere too.
    verbs = found.served(name) if word else EVERY_VERB
    answers = await asyncio.gather(
        *(doors.knock(port, token, verbs, name=SLOT.uid) for port in ports)
    )
    assert all(answer.answered for answer in answers), f"{name} {ports} answered nothing"
    return (
        set().union(*(answer.let_in for answer in answers)),
        set().union(*(answer.answered for answer in answers)),
        [text for answer in answers for text in answer.bodies.values()],
    )


# The API's verbs are no requests to a process, and the forwarder's are a wildcard. Rewards,
# batches and sandboxes are no part of a serving fleet: their own tests show tokens to them.
NO_REQUESTS = {
    *(Listener.API, Listener.FORWARD, Listener.REWARDS, Listener.SANDBOX, Listener.BATCHES),
    Listener.SCALER,
}
EVERY_VERB = {verb for one in Listener if one not in NO_REQUESTS for verb in rights.verbs(one)} | {
    "GET /",
    "GET /debug",
    "POST /slots/x/generate",
}


# Guards ask each other by certificates, which this fleet has none of (tests/agent/test_leading.py).
UNBOUND = {"agent": {"/rose.v1.Guard/Follow"}}


@pytest.mark.timeout(600)
async def test_each_verb_of_each_process_opens_to_whom_the_table_says(short_dir: Path) -> None:
    async with fleet(short_dir) as found:
        for name, listener in LISTENERS.items():
            served = found.served(name) | UNBOUND.get(name, set())
            assert served == rights.verbs(listener), f"{name}: a verb without a rule"
        received: list[str] = []
        ports = {name: [port for _, port in found.listeners(name)] for name in PORTS}
        for word in WHO:
            # Side by side: a stream that opens is waited for, and costs no processor time.
            knocked = await asyncio.gather(
                *(response_to(found, name, ports[name], word) for name in PORTS)
            )
            for name, (open_to, tried, bodies) in zip(PORTS, knocked, strict=True):
                expected = opened(name, word) & tried
                if word == "rival" and name == "store":
                    expected |= BLOCKS
                if word == "slot" and name == "host":  # the fake engine's model has no such file
                    expected -= {"GET /slots/{uid}/tokenizer"}
                assert open_to == expected, f"{name}, shown {word or 'nothing'}"
                received += bodies
        for pid in found.engines():
            for address, _ in doors.listeners([pid]):
                assert address in {"127.0.0.1", "::1"}, "an engine can be reached from elsewhere"
        held = sockets(found)
        assert held
        assert [path for path in held if path.exists() and not private(path, short_dir)] == []
        received.append(str(await found.node.report()))
        received += outputs(found)
        text = "\n".join(received)
        assert SLOT.uid in text, "the search looks where things are said"
        # Of its environment an engine's key is the one secret, and it opens nothing but the engine.
        assert [name for name, word in found.words.items() if word in text] == ["engine"]


# Modules that open a port or bind what others serve, and whose verbs those are.
LISTEN = {
    "agent/rose_agent/guard/main.py": Listener.AGENT,
    "agent/rose_agent/host/main.py": Listener.HOST,
    "agent/rose_agent/host/route/proxy.py": Listener.HOST,
    "operator/rose_operator/main.py": Listener.OPERATOR,
    "router/rose_router/http/app.py": Listener.ROUTER,
    "router/rose_router/main.py": Listener.ROUTER,
    "rewards/rose_rewards/main.py": Listener.REWARDS,
    "batches/rose_batches/http.py": Listener.BATCHES,
    "trainer/rose_trainer/adapters/forward.py": Listener.FORWARD,
    "trainer/rose_trainer/adapters/ingest.py": Listener.INGEST,
    "weights/rose_weights/main.py": Listener.STORE,
    "wire/rose_wire/observability.py": None,  # pages of whoever calls it
}
OPENS = re.compile(r"(?<![\w.])(?:web\.Application|(?:serving\.)?Server|plainpages\.serve)\(")


def test_whoever_opens_a_port_is_a_listener_of_the_table() -> None:
    rooms = (
        *("agent", "operator", "router", "trainer", "rewards", "batches", "weights", "wire"),
        "cli",
    )
    found = set()
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        opens = OPENS.search(path.read_text())
        # The stand-in of MPS calls a process of NVIDIA's a server.
        if opens and "devices/mps" not in str(path):
            found.add(str(path.relative_to(ROOT)))
    assert found == LISTEN.keys() | {"agent/rose_agent/tap/parser.py"}
    forwarded = {"* /{path}"}
    assert rights.verbs(Listener.FORWARD) == forwarded


def test_every_grpc_method_and_every_kind_has_a_rule() -> None:
    listeners = (one for one in Listener if one is not Listener.API)
    known = {verb for one in listeners for verb in rights.verbs(one) if verb.startswith("/")}
    # KEDA's own service: its messages are KEDA's, and no method of ours.
    assert known == set(doors.METHODS) | {f"/{keda.SERVICE}/{name}" for name in keda.METHODS}
    kinds = set()
    for kind in KINDS:
        kinds |= {f"read {kind.plural}", f"write {kind.plural}"}
        kinds |= {f"write {kind.plural}/status"} if kind.status is not None else set()
        kinds |= {f"write {kind.plural}/scale"} if kind.scale else set()
    assert rights.verbs(Listener.API) == kinds


def outputs(found: Fleet) -> list[str]:
    """Everything the processes logged, reported and show in lists of processes."""
    pids = {process.pid for process in found.node.processes.values()}
    output = [path.read_text(errors="replace") for path in found.node.root.rglob("*.log")]
    output += [repr(request) for request in found.node.operator.requests]
    output += [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids | found.engines()]
    output += [read(f"/proc/{pid}/environ") for pid in found.engines()]
    return output


def read(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.cluster
async def test_the_operator_hears_no_stranger(control_plane: ControlPlane, tmp_path: Path) -> None:
    install(control_plane)
    name = f"doors-{secrets.token_hex(4)}"
    control_plane.kubectl("create", "namespace", name)
    word = secrets.token_hex(16)
    (tmp_path / "word").write_text(word)
    own = (f"--token-file={tmp_path / 'word'}", "--log-level=DEBUG")
    module = "tests.faults.served"
    operator = OperatorProcess(control_plane.kubeconfig, tmp_path, name, more=own, module=module)
    await asyncio.to_thread(operator.start)
    try:
        assert operator.process is not None
        ports = [port for _, port in doors.listeners([operator.process.pid])]
        assert sorted(ports) == sorted((operator.sync_port, operator.http_port))
        served = set(operator.served.read_text().split("\n")) - {""}
        # Without --enrol-address nobody is given an identity.
        unbound = {"/rose.v1.Identity/Enrol", "/rose.v1.Identity/EnrolRouter"}
        assert served | unbound == rights.verbs(Listener.OPERATOR)
        for token, party in (
            ("", CallerParty.ANYBODY),
            ("guess", CallerParty.ANYBODY),
            (word, CallerParty.NODE),
        ):
            answers = [await doors.knock(port, token, served) for port in ports]
            received = set().union(*(answer.let_in for answer in answers))
            assert received == rights.allowed(Listener.OPERATOR, party) - unbound, party
            assert word not in "".join(text for one in answers for text in one.bodies.values())
        assert word not in operator.log.read_text()
    finally:
        operator.kill()
