"""What tenants, teams, pods of the network and serving pods try on a real node, and what holds.

Each party tries each verb of ``rose_core.rights`` that it should not have, at the real listeners.
Beside that stands what no table shows: a GPU by an annotation, pods outside a quota, pages and
files that are made to end their reader. ``docs/threat-model.md`` lists the attempts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from rose_core import rights
from rose_core.rights import CallerParty, Listener
from rose_core.wire.enrolment import EnrolRequest, EnrolRouterRequest
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until
from rose_wire import certificates
from rose_wire.bearer import lease_token
from rose_wire.method import Method, encode
from rose_wire.services import ENROL, ENROL_ROUTER
from tests.attack.installed import EVIL, Installed, Object
from tests.chart.installation import RESEARCH, SYSTEM, said
from tests.faults import doors
from tests.gpu_node.machine import IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
GROUP = "rose-gpu.dev/v1alpha1"
# Whose container it is.
LISTENERS = {
    "operator": Listener.OPERATOR,
    "guard": Listener.AGENT,
    "tap": Listener.TAP,
    "engine-host": Listener.HOST,
    "weight-sync": Listener.SYNC,
    "router": Listener.ROUTER,
    "store": Listener.STORE,
    "relay": Listener.RELAY,
}
# Blocks have no run and are known by the hashes in manifests of runs that a team may read.
BLOCKS = {f"/rose.v1.Weights/{name}" for name in ("Fetch", "Missing", "Put")}
PAGES = {"GET /metrics", "GET /healthz"}
WAYS = {
    "read": ("get", "list", "watch"),
    "write": ("create", "update", "patch", "delete", "deletecollection"),
}


def of(kind: str, name: str, **spec: Any) -> Object:  # noqa: ANN401  # YAML
    """An object of the tenant."""
    metadata = {"name": name, "namespace": EVIL}
    return {"apiVersion": GROUP, "kind": kind, "metadata": metadata, "spec": spec}


def pool(name: str, mode: str, **labels: str) -> Object:
    return of(
        "ServingPool",
        name,
        mode=mode,
        selector={"matchLabels": labels},
        engine={"kind": "SGLang", "port": 30000},
        maxLatencyIncreasePercent=100,
        lending={
            "maxReplicasPercent": 100,
            "minUnlentReplicas": 0,
            "memoryHeadroomPercent": 0,
            "borrowerNamespaces": [EVIL],
        },
    )


def lease(name: str, from_pool: str, **more: Any) -> Object:  # noqa: ANN401  # YAML
    return of(
        "RolloutLease",
        name,
        poolRef={"namespace": EVIL, "name": from_pool},
        model={"name": "tiny"},
        engineClass="fake",
        weights={"storeName": "main", "run": "evil-run"},
        **more,
    )


def pod(name: str, command: list[str], annotations: dict[str, str] | None = None) -> Object:
    metadata = {"namespace": EVIL, "labels": {"app": name.partition("-")[0]}}
    container = {
        "name": "engine",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "resources": {"limits": {"memory": "128Mi"}},
    }
    spec = {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}, **metadata},
        "spec": {**spec, "containers": [container]},
    }


@pytest.fixture(autouse=True)
def as_before(installed: Installed) -> Iterator[None]:
    """Whatever is tried: the victim's GPU stays with its team, and nothing of ROSE has ended."""
    slot, restarts = installed.slot(), victims(installed)
    yield
    assert installed.slot() == slot, "another team's slot"
    assert victims(installed) == restarts
    kinds = "rolloutleases,servingpools,pods"
    installed.node.kubectl("delete", kinds, "--all", f"--namespace={EVIL}", seconds=120)


def victims(installed: Installed) -> dict[str, int]:
    """Restarts of all containers but the routers that the tenant's own leases have."""
    return {
        name: count
        for name, count in installed.restarts().items()
        if not name.startswith(f"router-{EVIL}-")
    }


# --- a tenant with `edit` in one namespace


def test_the_api_server_lets_a_tenant_do_what_the_table_says_and_in_its_namespace_alone(
    installed: Installed,
) -> None:
    verbs = sorted(rights.verbs(Listener.API))
    reviews, wanted = [], []
    for verb, namespace in product(verbs, (EVIL, RESEARCH, SYSTEM)):
        right, _, resource = verb.partition(" ")
        name, _, sub = resource.partition("/")
        may = verb in rights.allowed(Listener.API, CallerParty.EDITOR) and namespace == EVIL
        for way in WAYS[right] if not sub else ("update", "patch"):
            asked = {"group": "rose-gpu.dev", "verb": way, "resource": name, "subresource": sub}
            reviews.append(review({**asked, "namespace": namespace}))
            wanted.append((f"{way} {resource} in {namespace}", may and way != "deletecollection"))
    for resource in ("secrets", "pods", "pods/exec", "configmaps"):
        for way in ("get", "list", "create", "delete"):
            asked = {"verb": way, "resource": resource, "namespace": SYSTEM}
            reviews.append(review(asked))
            wanted.append((f"{way} {resource} in {SYSTEM}", False))
    listed = {"apiVersion": "v1", "kind": "List", "items": reviews}
    reported = installed.node.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(listed))
    found = [one["status"]["allowed"] for one in each(reported)]
    assert [words for (words, may), is_so in zip(wanted, found, strict=True) if may != is_so] == []


def each(text: str) -> Iterator[Object]:
    """The objects of an output of kubectl, which prints one after the other."""
    decoder = json.JSONDecoder()
    while text := text.strip():
        one, end = decoder.raw_decode(text)
        text = text[end:]
        yield one


def review(asked: dict[str, str]) -> Object:
    name, _, sub = asked["resource"].partition("/")
    attributes = {**asked, "resource": name, "subresource": asked.get("subresource") or sub}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": "eve",
            "groups": ["system:authenticated"],
            "resourceAttributes": attributes,
        },
    }


def test_an_annotation_neither_lends_another_pods_gpu_nor_takes_its_loan_away(
    installed: Installed,
) -> None:
    (gpu,) = (installed.state.gpus[index].uuid for index in installed.victim.gpus)
    engine = ["python", "-m", "rose_engines.fake", "--host", "0.0.0.0", "--port", "30000"]
    bait = pod("bait", engine, {"rose-gpu.dev/gpus": gpu})
    installed.apply(bait, pool("bait", "Lend", app="bait"), lease("steal", "bait"), as_eve=True)
    installed.wait(
        lambda: "NoGPU" in said(installed.node, "rlease", "steal", EVIL, "Granted"),
        "the lease says that the pod has no GPU",
    )
    lent = {slot["spec"]["members"][0]["podName"] for slot in installed.slots()}
    assert lent == {installed.victim.name}


def test_a_tenant_neither_ranks_itself_first_nor_makes_the_operator_run_pods(
    installed: Installed,
) -> None:
    before = {one["metadata"]["uid"] for one in deployments(installed)}
    greedy = [
        lease("first", "none", priority=1000),
        lease("heavy", "none", weight=1000),
        lease("many", "none", router={"replicas": 16}),
        lease("theirs", "none") | {"metadata": {"name": "theirs", "namespace": EVIL}},
    ]
    greedy[3]["spec"]["weights"] = {"storeName": "main", "run": "grpo"}
    floods = [lease(f"flood-{number}", "none") for number in range(12)]
    installed.apply(pool("none", "Lend", no="such"), *greedy, *floods, as_eve=True)
    names = [one["metadata"]["name"] for one in (*greedy, *floods)]
    path = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Accepted")].reason} '
    where = ("rlease", f"--namespace={EVIL}", f"--output=jsonpath={path}{{end}}")

    def reasons() -> dict[str, str]:
        words = installed.node.kubectl("get", *where).split()
        return dict(word.split("=", 1) for word in words)

    installed.wait(lambda: all(reasons().get(name) for name in names), "all were judged")
    found = reasons()
    assert {found[name] for name in ("first", "heavy", "many")} == {"TenantPolicyForbids"}
    assert found["theirs"] == "RunNotAllowed"
    capped = [name for name in names if found[name] == "TenantCapReached"]
    assert len(capped) == len(floods) - 2, found
    # No router before a slot is possible: this pool has no pod.
    made = {one["metadata"]["name"] for one in deployments(installed) if new(one, before)}
    assert len(made) <= 2, made
    assert not installed.get("pods", "-n", EVIL)


def deployments(installed: Installed) -> list[Object]:
    return installed.get("deployments", "-A", "-l", "app.kubernetes.io/name=rose-router")


def new(one: Object, before: set[str]) -> bool:
    return one["metadata"]["uid"] not in before


@pytest.mark.parametrize("arguments", [{"trust-remote-code": "true"}, {"model-path": "/etc"}])
def test_an_argument_that_is_not_on_the_list_is_refused_at_the_door(
    installed: Installed, arguments: dict[str, str]
) -> None:
    asked = lease("code", "none", engineArguments=arguments)
    with pytest.raises(CommandFailed, match="engineArguments"):
        installed.apply(asked, as_eve=True)


def test_a_value_that_is_none_of_the_arguments_is_refused_before_any_engine(
    installed: Installed,
) -> None:
    asked = lease("value", "none", engineArguments={"dtype": "bfloat16;sh"})
    installed.apply(asked, as_eve=True)
    installed.wait(
        lambda: installed.reason_of("rlease", "value", "Accepted") == "ArgumentNotAllowed",
        "the lease says that the value is none",
    )


def test_the_shipped_sample_is_taken(installed: Installed) -> None:
    sample = yaml.safe_load((HERE.parents[1] / "crds/samples/rolloutlease.yaml").read_text())
    sample["metadata"]["name"] = "sample"  # the suite's own lease has the sample's name
    text = json.dumps(sample)
    installed.node.kubectl("create", "--dry-run=server", "--filename=-", stdin=text)


# --- a pod on the cluster's network, a team with its own credential


def ports(installed: Installed) -> Iterator[tuple[Listener, str, frozenset[str]]]:
    """Every port that a container of ROSE declares, and what could be asked there."""
    for one in installed.pods():
        for container in one["spec"]["containers"]:
            listener = LISTENERS[container["name"]]
            for port in container.get("ports", ()):
                address = f"{one['status']['podIP']}:{port['containerPort']}"
                verbs = rights.verbs(listener)
                if listener is Listener.HOST:  # its pages and its data route are two ports
                    data = port["name"] == "data"
                    verbs = frozenset(verb for verb in verbs if ("/slots/" in verb) is data)
                yield listener, address, verbs


def bearers(installed: Installed) -> dict[str, tuple[str, dict[Listener, tuple[CallerParty, ...]]]]:
    """Credentials that somebody could bring, and where they make him somebody."""
    theirs, lease_of = f"{EVIL}/default", f"{RESEARCH}/grpo"
    token = installed.token
    platform = installed.secret("rose-token", "token").decode()
    store = installed.credentials
    router, at_store = Listener.ROUTER, Listener.STORE
    return {
        "nothing": ("", {}),
        "a guess": ("guess", {}),
        "another namespace's account": (token(theirs, f"rose-lease/{lease_of}"), {}),
        "another lease's account": (token(f"{RESEARCH}/default", "rose-lease/research/other"), {}),
        "the account's own token": (token(f"{RESEARCH}/default", "https://kubernetes"), {}),
        "the installation's token": (platform, {Listener.AGENT: (CallerParty.PLATFORM,)}),
        "another team's credential": (store["evil"], {}),
        "the cluster's credential": (store["cluster"], {at_store: (CallerParty.NODE,)}),
        "the team's credential": (store["research"], {at_store: (CallerParty.TRAINER,)}),
        "the team's harness": (
            token(f"{RESEARCH}/default", f"rose-turns/{lease_of}"),
            {router: (CallerParty.HARNESS,)},
        ),
        "the team's trainer": (
            token(f"{RESEARCH}/default", f"rose-lease/{lease_of}"),
            {router: (CallerParty.TRAINER,)},
        ),
    }


async def test_each_port_opens_each_verb_to_whom_the_table_says(installed: Installed) -> None:
    authority = await asyncio.to_thread(installed.secret, "rose-tls", "ca.crt")
    namespace = installed.router()["metadata"]["namespace"]
    who = await asyncio.to_thread(bearers, installed)
    wrong = []
    for listener, place, verbs in ports(installed):
        at = namespace if listener is Listener.ROUTER else SYSTEM
        # The test's store speaks plain text.
        trust = None if listener is Listener.STORE else doors.Trust(authority, f"any.{at}.svc")
        for bearer, (word, parties) in who.items():
            found = await doors.knock(place, word, verbs, trust)
            known = parties.get(listener, (CallerParty.ANYBODY,))
            may = set().union(*(rights.allowed(listener, party) for party in known))
            if bearer == "another team's credential" and listener is Listener.STORE:
                may |= BLOCKS
            if listener is Listener.ROUTER:  # no `rose batches` stands behind this one: 404
                may -= rights.allowed(Listener.BATCHES, CallerParty.ROUTER) - PAGES
            if found.let_in != may & found.answered:
                more, less = found.let_in - may, (may & found.answered) - found.let_in
                wrong.append(f"{listener} {place}, {bearer}: opened {more}, closed {less}")
            assert found.answered, f"{listener} {place} answers nothing"
    await asyncio.to_thread(resume, installed)
    assert not wrong, "\n".join(wrong)


def resume(installed: Installed) -> None:
    """The trainer has paused its router, as it may."""
    word = installed.token(f"{RESEARCH}/default", f"rose-lease/{RESEARCH}/grpo")
    assert post(installed, "/continue_generation", b"{}", word) == 200


def post(installed: Installed, path: str, body: bytes, word: str) -> int:
    """Status of a request to the team's router."""
    address = installed.router()["status"]["podIP"]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {word}"}
    request = urllib.request.Request(f"http://{address}:8000{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # to the cluster
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_one_large_request_for_four_thousand_answers_does_not_end_a_router(
    installed: Installed,
) -> None:
    ids = ",".join(str(100_000 + number % 50_000) for number in range(1_000_000))
    asked = f'{{"input_ids":[{ids}],"sampling_params":{{"max_new_tokens":1,"n":4096}}}}'
    word = installed.token(f"{RESEARCH}/default", f"rose-lease/{RESEARCH}/grpo")
    statuses = {post(installed, "/generate", asked.encode(), word) for _ in range(3)}
    assert statuses <= {400, 413, 422, 503}, statuses
    address = installed.router()["status"]["podIP"]
    with urllib.request.urlopen(f"http://{address}:8000/healthz", timeout=10) as page:
        assert page.status == 200


# --- a router that was taken over


@dataclass(frozen=True)
class Held:
    """What whoever owns a router's process owns.

    Attributes:
        words: tokens, by what they are.
        own: key and certificate.
        slot: uid of the slot whose token is among them.
    """

    words: dict[str, str]
    own: tuple[bytes, bytes]
    slot: str


def held_by_the_router(installed: Installed) -> Held:
    """Out of its own container, and what it was told: its lease's token, its slot's."""
    router = installed.router()["metadata"]
    where = (router["name"], f"--namespace={router['namespace']}", "--container=router")

    def read(path: str) -> str:
        return installed.node.kubectl("exec", *where, "--", "cat", path)

    platform = installed.secret("rose-token", "token").decode()
    uid, _ = installed.slot()
    order = installed.node.root() / "run/rose/slots" / uid / "slot.json"
    words = {
        "proof of its pod": read("/var/run/rose/proof/token").strip(),
        "token of its lease": lease_token(platform, f"{RESEARCH}/grpo"),
        "token of its slot": json.loads(order.read_text())["token"],
    }
    identity = "/run/rose/identity"
    own = (read(f"{identity}/tls.key").encode(), read(f"{identity}/tls.crt").encode())
    return Held(words, own, uid)


async def test_a_router_that_was_taken_over_opens_what_the_table_gives_routers_and_no_more(
    installed: Installed,
) -> None:
    """Each credential at each verb of each other process, with the router's certificate."""
    held = await asyncio.to_thread(held_by_the_router, installed)
    authority = await asyncio.to_thread(installed.secret, "rose-tls", "ca.crt")
    opened: dict[Listener, set[str]] = {}
    wrong = []
    for listener, place, verbs in ports(installed):
        if listener is Listener.ROUTER:
            continue  # it is its own; another lease's takes another token
        plain = listener is Listener.STORE
        trust = None if plain else doors.Trust(authority, f"any.{SYSTEM}.svc", held.own)
        for what, word in held.words.items():
            found = await doors.knock(place, word, verbs, trust, held.slot)
            assert found.answered, f"{listener} {place} answers nothing"
            opened.setdefault(listener, set()).update(found.let_in)
            if more := found.let_in - rights.allowed(listener, CallerParty.ROUTER):
                wrong.append(f"{listener} {place}, {what}: opened {more}")
    assert not wrong, "\n".join(wrong)
    assert opened.keys() >= {Listener.OPERATOR, Listener.AGENT, Listener.HOST, Listener.STORE}
    assert "POST /slots/{uid}/generate" in opened[Listener.HOST], "it reached its own slot"


async def test_a_router_that_was_taken_over_is_given_nothing_of_other_leases_or_nodes(
    installed: Installed,
) -> None:
    held = await asyncio.to_thread(held_by_the_router, installed)
    authority = await asyncio.to_thread(installed.secret, "rose-tls", "ca.crt")
    proof = held.words["proof of its pod"]
    trust = doors.Trust(authority, f"rose-operator.{SYSTEM}.svc", held.own)
    key, signing = certificates.request("rose-router")
    assert key
    asked: list[tuple[Method[Any, Any], Any]] = [
        (ENROL, EnrolRequest("rose-dev", proof, signing)),
        (ENROL_ROUTER, EnrolRouterRequest(f"{EVIL}/other", proof, signing)),
        (ENROL_ROUTER, EnrolRouterRequest(f"{RESEARCH}/grpo", proof, signing)),
    ]
    enrolling = [
        f"{one['status']['podIP']}:{port['containerPort']}"
        for one in installed.pods()
        for container in one["spec"]["containers"]
        if container["name"] == "operator"
        for port in container["ports"]
        if port["name"] == "enrol"
    ]
    async with doors.dialled(enrolling[0], trust) as channel:
        received = []
        for method, message in asked:
            call = channel.unary_stream(method.path)(encode(message), timeout=20)
            received.append(await first_of(call))
    assert ["BEGIN CERTIFICATE" in text for text in received] == [False, False, True], received
    assert all("StatusCode" in text for text in received[:2]), "they were refused, not lost"


async def first_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> str:
    """The first answer of a stream, or how it was refused."""
    try:
        found = await call.read()
    except grpc.aio.AioRpcError as error:
        return f"{error.code()} {error.details()}"
    finally:
        call.cancel()
    return found.decode(errors="replace") if isinstance(found, bytes) else "Refused: no answer"


def test_the_api_server_gives_a_router_nothing(installed: Installed) -> None:
    """Its token is for the operator alone, and its account has no right."""
    router = installed.router()
    namespace = router["metadata"]["namespace"]
    user = f"system:serviceaccount:{namespace}:{router['spec']['serviceAccountName']}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    asked = []
    for verb, where in product(sorted(rights.verbs(Listener.API)), (RESEARCH, SYSTEM, namespace)):
        right, _, resource = verb.partition(" ")
        name, _, sub = resource.partition("/")
        each_way = WAYS[right] if not sub else ("update", "patch")
        group = {"group": "rose-gpu.dev", "namespace": where}
        asked += [{**group, "verb": way, "resource": name, "subresource": sub} for way in each_way]
    for resource in ("secrets", "pods", "pods/exec", "configmaps", "serviceaccounts/token"):
        for way, where in product(("get", "list", "create"), (SYSTEM, RESEARCH, namespace)):
            asked.append({"verb": way, "resource": resource, "namespace": where})
    reviews = [review(one) for one in asked]
    for one in reviews:
        one["spec"] |= {"user": user, "groups": [*groups, "system:authenticated"]}
    listed = {"apiVersion": "v1", "kind": "List", "items": reviews}
    reported = installed.node.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(listed))
    found = [one["status"]["allowed"] for one in each(reported)]
    assert [one for one, may in zip(asked, found, strict=True) if may] == []
    proof = held_by_the_router(installed).words["proof of its pod"]
    server = yaml.safe_load(installed.node.kubeconfig.read_text())["clusters"][0]["cluster"]
    trust = ssl.create_default_context(
        cadata=base64.b64decode(server["certificate-authority-data"]).decode()
    )
    url = f"{server['server']}/api/v1/namespaces/{namespace}/pods"
    shown = {"Authorization": f"Bearer {proof}"}
    request = urllib.request.Request(url, headers=shown)  # noqa: S310  # to the cluster
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20, context=trust)  # noqa: S310  # to the cluster
    refused.value.close()
    assert refused.value.code == 401


# --- an owner of a pool, whose serving pods are hostile

TRICKS = ("bomb", "endless", "slow", "shrink", "sparse", "exchange", "names")


def test_serving_pods_that_attack_their_reader_end_neither_the_guard_nor_a_loan(
    installed: Installed,
) -> None:
    script = (HERE / "hostile.py").read_text()
    pods = [pod(f"hostile-{trick}", ["python", "-c", script, trick]) for trick in TRICKS]
    installed.apply(*pods, pool("hostile", "Lend", app="hostile"), as_eve=True)

    def asked() -> dict[str, int]:
        """How often the guard has read each of them."""
        found = {}
        for one in installed.get("pods", "-n", EVIL, "-l", "app=hostile"):
            address = one["status"].get("podIP", "")
            found[one["metadata"]["name"]] = count_at(address)
        return found

    # Whoever never ends his page is read once, and again after the reader's patience.
    installed.wait(
        lambda: len(asked()) == len(TRICKS) and all(count >= 2 for count in asked().values()),
        "each of them was read and read again",
    )
    path = "jsonpath={.status.conditions[?(@.type=='TelemetryFresh')].status}"
    where = ("servingpool", "chat", "--namespace=serving", f"--output={path}")
    wait_until(
        lambda: installed.node.kubectl("get", *where).strip() == "True",
        "the victim's own signals go on",
        seconds=30,
    )


def count_at(address: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}:30000/asked", timeout=5) as page:
            return int(page.read())
    except (OSError, ValueError):
        return 0
