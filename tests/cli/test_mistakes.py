"""What people get wrong is told in a line: what, where, what to do; never a traceback."""

import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_cli import main as cli

MISTAKES = {
    "a kubeconfig that is no YAML": (
        "status --kubeconfig {broken}",
        "{broken} is no kubeconfig",
    ),
    "a kubeconfig that is a word": (
        "top --kubeconfig {word}",
        "{word} is no kubeconfig (clusters, users or contexts are missing); set KUBECONFIG",
    ),
    "a kubeconfig that is no text": (
        "status --kubeconfig {binary}",
        "{binary} is no kubeconfig",
    ),
    "a guard's token that is no text": (
        "agent --node n --rundir {new} --devices static --token-file {binary}",
        "--token-file {binary}: holds no text",
    ),
    "an operator's token that is no text": (
        "operator --router-image i --token-file {binary} --stores-file {stores}",
        "--token-file {binary}: holds no text",
    ),
    "an operator's empty token": (
        "operator --router-image i --token-file {empty} --stores-file {stores}",
        "--token-file {empty}: holds no token",
    ),
    "a tokenizer that is none": (
        "router --lease a/b --tokenizer {word}",
        "{word} is no tokenizer.json: expected value",
    ),
    "a certificate that is none": (
        "router --lease a/b --tls-dir {pair}",
        "--tls-dir {pair}/tls.crt: holds no certificate in PEM that tls.key beside it is the key",
    ),
    "a URL's certificate that is none": (
        "router --lease a/b --http-tls-dir {pair} --http-address 127.0.0.1:0"
        " --attach-address 127.0.0.1:0",
        "--http-tls-dir {pair}/tls.crt: holds no certificate in PEM",
    ),
    "a store's certificate that is none": (
        "weights serve --root {new} --address 127.0.0.1:0 --tls-dir {pair}",
        "{pair}/tls.crt: holds no certificate in PEM",
    ),
    "an API server's authority that is none": (
        "agent --node n --rundir {new} --devices static --http-port 0 --kube-url https://a:1"
        " --kube-token-file {stores} --kube-ca-file {word}",
        "--kube-ca-file {word}: holds no certificate in PEM",
    ),
    "an API server that is no web address": (
        "agent --node n --kube-url here",
        "'here' is no web address; expected http://HOST:PORT",
    ),
    "an operator without a port": (
        "agent --node n --operator here",
        "'here' is no address to dial",
    ),
    "brackets that are not closed": ("weights serve --root {new} --address [::1:5", "[::1:5"),
    "a host's pages that are no web address": (
        "vacate --url http://[::1:5",
        "is no web address; expected http://HOST:PORT",
    ),
    "callers' tokens that are no text": (
        "router --lease a/b --turn-token-file {binary}",
        "{binary} holds no text; write one token per line",
    ),
    "stores that are no text": (
        "operator --router-image i --token-file {stores} --stores-file {binary}",
        "{binary}: holds no text",
    ),
    "an address of the data route that nobody has": (
        "engine-host --models {pair} --rundir {new} --cgroup signals --http-port 0 --data-port 0"
        " --data-host nowhere.invalid",
        "--data-host nowhere.invalid: cannot listen on port 0 there",
    ),
    "a sleeper's page that is no web address": (
        "sleeper --rundir {new} --vacated-url here",
        "'here' is no web address",
    ),
    "an ingest that is no web address": (
        "router --lease a/b --ingest-url here",
        "--ingest-url: 'here' is no web address; expected http://HOST:PORT",
    ),
    "a daemon's folder that is a file": ("mps --root {word}", "--root {word}"),
    "a relay's taken port": (
        "weights relay --upstream a:1 --root {new} --address 127.0.0.1:0 --http-port {taken}",
        "address already in use",
    ),
    "a context that is none": (
        "status --kubeconfig {cluster} --context other",
        "has no context 'other'; it has: here",
    ),
    "an API server that is not there": (
        "status --kubeconfig {cluster}",
        "https://127.0.0.1:1 cannot be reached",
    ),
    "a name with its namespace": (
        "explain lease research/grpo --kubeconfig {cluster}",
        "give --namespace research and grpo",
    ),
    "nothing to pause": ("pause", "name pools, or give --all"),
    "everything and a pool": ("resume chat --all", "name pools, or give --all"),
    "a sleeper without a driver": (
        "sleeper --rundir {new} --devices static --static-gpus {word}",
        "--static-gpus {word}: expected a YAML mapping, found str",
    ),
    "replicas that are none": (
        "agent --node n --rundir {new} --devices static --static-replicas {broken}",
        "--static-replicas {broken}: line 1 is no YAML",
    ),
    "stores that are no YAML": (
        "operator --router-image i --token-file {word} --stores-file {broken}",
        "{broken}: line 1 is no YAML",
    ),
    "no engine class": (
        "operator --router-image i --token-file {word} --stores-file {stores} --engine-classes ,",
        "names none",
    ),
    "a token that is not there": (
        "agent --node n --rundir {new} --devices static --token-file {none}",
        "--token-file {none}: No such file",
    ),
    "a guard's empty token": (
        "agent --node n --rundir {new} --devices static --token-file {empty}",
        "--token-file {empty}: holds no token",
    ),
    "a sync's empty token": (
        "weight-sync --rundir {new} --token-file={empty}",
        "--token-file {empty}: holds no token",
    ),
    "a level that is none": ("agent --node n --log-level loud", "choose from 'DEBUG'"),
    "a port that is none": ("agent --node n --http-port 99999", "'99999' is no port"),
    "a run directory nobody can make": ("tap --rundir /proc/none", "--rundir /proc/none"),
    "a tap's level": ("tap --log-level loud", "choose from 'DEBUG'"),
    "nothing to resume": ("agent resume --rundir {none}", "no guard runs in {none}"),
    "a sync's token": (
        "weight-sync --rundir {new} --token-file={none}",
        "--token-file {none}: No such file",
    ),
    "a store's empty token": (
        "weights serve --root {new} --address 127.0.0.1:0 --token-file {empty}",
        "--token-file {empty}: holds no token",
    ),
    "a router's empty token": (
        "router --lease a/b --token-file {empty}",
        "--token-file {empty}: holds no token",
    ),
    "a store's token": (
        "weights serve --root {new} --address 127.0.0.1:0 --token-file {none}",
        "--token-file {none}: No such file",
    ),
    "a relay's port": ("weights relay --upstream a:1 --root {new} --http-port 99999", "is no port"),
    "a host's level": ("engine-host --models {new} --log-level loud", "choose from 'DEBUG'"),
    "a wait that never ends": ("explain pool chat --timeout inf", "'inf' is no amount"),
    "a load that loads nothing": ("demo --load 0", "'0' is too little"),
    "a wait below nothing": ("explain pool chat --timeout -1", "'-1' is no amount"),
    "a price that is none": ("report --dedicated-hour nan", "'nan' is no amount"),
    "a count that is not finite": ("report --accepted a/b=inf", "is no NAMESPACE/LEASE=NUMBER"),
    "fewer rows than none": ("top --limit -3", "'-3' is no count"),
    "a count below nothing": ("router --lease a/b --max-staleness -1", "'-1' is no count"),
    "a share above all": ("router --lease a/b --explore 7", "'7' is no share"),
    "an amount that is none": ("router --lease a/b --pause-seconds soon", "'soon' is no amount"),
    "a window below nothing": ("weights serve --root {new} --window -3", "'-3' is no count"),
    "a daemon's level": ("mps --log-level loud", "choose from 'DEBUG'"),
    "a daemon that is not there": (
        "mps --program {none} --root {new}",
        "{none}: no such program; --program names it",
    ),
    "an operator's port": (
        "operator --router-image i --token-file {word} --stores-file {word} --http-port abc",
        "'abc' is no port",
    ),
    "an ingest's address": (
        "ingest --store a:1 --run r --root {new} --address here",
        "'here' is no address to listen on",
    ),
    "a lease without a namespace": ("router --lease grpo", "expected NAMESPACE/NAME"),
    "an address without a port": (
        "router --lease a/b --http-address here",
        "'here' is no address to listen on; expected HOST:PORT",
    ),
    "a certificate that is not there": (
        "router --lease a/b --tls-dir {none}",
        "--tls-dir {none}/tls.key: No such file",
    ),
    "grants that lapse before a new leader renews them": (
        "operator --router-image i --token-file {word} --stores-file {word} --grant-seconds 10",
        "--grant-seconds 10 is too short",
    ),
    "a period that is none": (
        "operator --router-image i --token-file {word} --stores-file {word} --sync-seconds 0",
        "'0' is too little",
    ),
    "a wait for a GPU without an end": ("vacate --deadline-seconds nan", "'nan' is no amount"),
    "a limit of nats that is none": ("weight-sync --probe-limit nan", "'nan' is no amount"),
    "fewer commits than none": ("weights commits --last -1", "'-1' is no count"),
    "a data port that is none": ("engine-host --models {new} --data-port 99999", "is no port"),
    "less memory than none": ("engine-host --engine-memory-mib -5", "'-5' is no count"),
    "a store's address without a port": (
        "weights serve --root {new} --address here",
        "'here' is no address to listen on",
    ),
    "a store without a port": (
        "weights relay --upstream store --root {new}",
        "'store' is no address to dial; expected HOST:PORT",
    ),
    "a verb of the agent that is none": ("agent pause", "no verb 'pause'; expected report, trace"),
    "a rest below nothing": ("agent --node n --settle-seconds -3", "'-3' is no amount"),
    "less room than none": (
        "weights relay --upstream a:1 --root {new} --keep-bytes -1",
        "'-1' is no count",
    ),
    "patience below nothing": (
        "ingest --store a:1 --run r --root {new} --patience-seconds -1",
        "'-1' is no amount",
    ),
    "a tap's rate below nothing": ("tap --rundir {new} --sample-from -1", "'-1' is no amount"),
    "a stores file that is not there": (
        "operator --router-image i --token-file {word} --stores-file {none}",
        "{none}: No such file",
    ),
}


KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: x}}]
contexts: [{name: here, context: {cluster: c, user: u}}]
current-context: here
"""


@pytest.fixture
def places(short_dir: Path) -> Iterator[dict[str, Path]]:
    made = {name: short_dir / name for name in ("broken", "word", "new", "none", "empty", "binary")}
    made["broken"].write_text("a: [")
    made["word"].write_text("hello")
    made["empty"].touch()
    made["binary"].write_bytes(b"\xff\xfe\x00\x80")
    made["stores"] = short_dir / "stores"
    made["stores"].write_text("main: store.example:7446")
    made["cluster"] = short_dir / "cluster"
    made["cluster"].write_text(KUBECONFIG)
    made["pair"] = short_dir / "pair"
    made["pair"].mkdir()
    for name in ("tls.crt", "tls.key"):
        (made["pair"] / name).write_text("hello")
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)
    logging.getLogger().handlers.clear()


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_a_line(
    case: str,
    places: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as held:
        named = {**places, "taken": held.getsockname()[1]}
        words, wanted = (text.format(**named) for text in MISTAKES[case])
        try:
            code = cli.main(words.split())
        except SystemExit as stop:  # argparse's own
            code = int(stop.code or 0)
    output = capfd.readouterr().err + caplog.text
    assert code in {1, 2}
    assert wanted in output
    assert "Traceback" not in output


def test_an_interruption_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verb(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", lambda _name, _verb: verb)
    assert cli.main(["status"]) == 130
    assert capsys.readouterr().err == ""
