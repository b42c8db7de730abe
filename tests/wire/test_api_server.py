"""What is asked of an API server, with what, and what its answers mean."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose_dev.cluster.pki import Authority
from rose_dev.waiting import until
from rose_wire.api_server import ANSWER_SECONDS, ApiServer, Resource, access_to, find_access
from rose_wire.errors import NotConfigured, StatusError, Unavailable
from rose_wire.ports import free_port

SLOTS = Resource("rose-gpu.dev", "v1alpha1", "RolloutSlot", "rolloutslots")
NODES = Resource("", "v1", "Node", "nodes", namespaced=False)
KUBECONFIG = """\
clusters: [{name: c, cluster: {server: "http://file:1"}}]
users: [{name: u, user: {}}]
contexts:
- {name: x, context: {cluster: c, user: u}}
- {name: y, context: {cluster: c, user: u, namespace: team}}
current-context: x
"""
Handle = Callable[[web.Request], Any]


class Served:
    """An API server of a test; ``handle`` answers, ``asked`` keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.handle: Handle
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        answer = self.handle(request)
        response: web.StreamResponse = answer if isinstance(answer, web.Response) else await answer
        return response

    @property
    def url(self) -> str:
        return str(self.server.make_url("/"))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    async with one.server:
        yield one


@pytest.fixture
async def api(served: Served) -> AsyncIterator[ApiServer]:
    server = ApiServer(access_to(served.url, "word"), trust_env=False, field_manager="me")
    yield server
    await server.close()


def item(name: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def page(*items: dict[str, Any], more: str = "") -> web.Response:
    metadata = {"resourceVersion": "7", "continue": more}
    return web.json_response({"metadata": metadata, "items": items})


def pod(folder: Path, monkeypatch: pytest.MonkeyPatch, port: int = 6443) -> Path:
    """What a kubelet puts into a pod."""
    for name, text in (("token", "first"), ("namespace", "mine"), ("ca.crt", "an authority")):
        (folder / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    return folder


@pytest.mark.parametrize(
    ("resource", "where", "path"),
    [
        (SLOTS, (), "/apis/rose-gpu.dev/v1alpha1/rolloutslots"),
        (SLOTS, ("a",), "/apis/rose-gpu.dev/v1alpha1/namespaces/a/rolloutslots"),
        (SLOTS, ("a", "b", "status"),
         "/apis/rose-gpu.dev/v1alpha1/namespaces/a/rolloutslots/b/status"),
        (SLOTS, ("a", "b/../c?d"),
         "/apis/rose-gpu.dev/v1alpha1/namespaces/a/rolloutslots/b%2F..%2Fc%3Fd"),
        (NODES, ("a", "b"), "/api/v1/nodes/b"),
    ],
)  # fmt: skip
def test_a_kind_is_asked_for_at_its_own_path(
    resource: Resource, where: tuple[str, ...], path: str
) -> None:
    assert resource.path(*where) == path


async def test_a_pod_is_known_by_its_service_account_whatever_kubeconfig_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(file))
    account = tmp_path / "account"
    account.mkdir()
    outside = await find_access(service_account=account)
    assert (outside.server, outside.namespace) == ("http://file:1", "default")
    inside = await find_access(service_account=pod(account, monkeypatch))
    assert (inside.server, inside.namespace) == ("https://127.0.0.1:6443", "mine")
    named = await find_access(file, "y", service_account=account)
    assert (named.server, named.namespace) == ("http://file:1", "team")


@pytest.mark.parametrize(
    ("text", "context", "word"),
    [
        (None, None, "not found"),
        ("a: [", None, "is no kubeconfig"),
        ("word", None, "clusters, users or contexts are missing"),
        ("clusters: []\n", None, "clusters, users or contexts are missing"),
        (KUBECONFIG, "z", "no context 'z'; it has: x, y"),
        (KUBECONFIG.replace("current-context: x", ""), None, "names no current context"),
        (KUBECONFIG.replace("cluster: c", "cluster: d"), None, "name d"),
        (KUBECONFIG.replace("http:", "https:").replace("user: u", "user: v"), None, "user of"),
    ],
)
async def test_what_is_wrong_with_a_kubeconfig_is_said(
    tmp_path: Path, text: str | None, context: str | None, word: str
) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    with pytest.raises(NotConfigured, match=word):
        await find_access(file, context)


async def test_a_file_that_a_kubeconfig_names_lies_beside_it(tmp_path: Path) -> None:
    cluster = '{server: "https://file:1", certificate-authority: ca.crt}'
    text = KUBECONFIG.replace('{server: "http://file:1"}', cluster)
    (tmp_path / "config").write_text(text.replace("user: {}", "user: {tokenFile: token}"))
    (tmp_path / "ca.crt").write_text("an authority")
    (tmp_path / "token").write_text("word")
    found = (await find_access(tmp_path / "config")).configuration
    assert found.ssl_ca_cert == str(tmp_path / "ca.crt")
    assert found.api_key == {"BearerToken": "Bearer word"}


async def test_a_plugin_that_gives_no_credentials_is_told_and_nobody_is_asked_as_nobody(
    tmp_path: Path,
) -> None:
    plugin = "exec: {apiVersion: client.authentication.k8s.io/v1, command: 'false'}"
    (tmp_path / "config").write_text(KUBECONFIG.replace("user: {}", f"user: {{{plugin}}}"))
    with pytest.raises(NotConfigured, match="the plugin of context 'x' gave no credentials"):
        await find_access(tmp_path / "config")


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match="certificates for https://x: "):
        ApiServer(access_to("https://x", authority=tmp_path / "none"))


async def test_a_token_that_was_replaced_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account's lives an hour; kubelet writes the next one into the same file."""
    shown: list[str] = []
    good = ["first"]

    def answer(request: web.Request) -> web.Response:
        shown.append(request.headers["Authorization"].partition(" ")[2])
        return web.json_response(item("a"), status=200 if shown[-1] == good[-1] else 401)

    authority = Authority(tmp_path / "pki")
    authority.issue("server", "server", hosts=("127.0.0.1",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "pki" / "server.crt", tmp_path / "pki" / "server.key")
    served = Served()
    served.handle = answer
    await served.server.start_server(ssl=tls)
    port = served.server.port
    assert port is not None
    account = pod(tmp_path, monkeypatch, port)
    (account / "ca.crt").write_bytes(authority.certificate.read_bytes())
    api = ApiServer(await find_access(service_account=account), trust_env=False)
    await api.get(SLOTS, "a")
    good.append("second")
    with pytest.raises(StatusError, match="401"):
        await api.get(SLOTS, "a")
    (account / "token").write_text("second")
    for _ in range(2):
        assert (await api.get(SLOTS, "a"))["metadata"]["name"] == "a"
    assert shown == ["first", "first", "first", "first", "second", "second"]
    await api.close()
    await served.server.close()


async def test_a_plugin_of_a_kubeconfig_says_who_asks_and_is_asked_anew(
    served: Served, tmp_path: Path
) -> None:
    """Clouds' kubeconfigs have one; ``KUBECONFIG`` may name several files, as kubectl takes it."""
    plugin, answered = tmp_path / "plugin", tmp_path / "answered"
    version = "client.authentication.k8s.io/v1"

    def say(token: str) -> None:
        status = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token}}
        answered.write_text(json.dumps(status))

    plugin.write_text(f"#!/bin/sh\ncat {answered}\n")
    plugin.chmod(0o755)
    say("one")
    run = {"apiVersion": version, "command": str(plugin)}
    parts: list[Any] = [
        {"users": [{"name": "u", "user": {"exec": run}}]},
        {
            "clusters": [{"name": "c", "cluster": {"server": served.url}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        },
    ]
    files = [tmp_path / "users", tmp_path / "clusters"]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part))
    shown: list[str] = []

    def answer(request: web.Request) -> web.Response:
        shown.append(request.headers["Authorization"])
        return web.json_response(item("a"), status=200 if shown[-1] == "Bearer two" else 401)

    served.handle = answer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", ":".join(map(str, files)))
        access = await find_access(service_account=tmp_path)
        api = ApiServer(access, trust_env=False)
        say("two")
        await api.get(SLOTS, "a")
    assert shown == ["Bearer one", "Bearer two"]
    await api.close()


async def test_a_certificate_of_a_plugin_that_has_ended_is_replaced(tmp_path: Path) -> None:
    """A connection shows one certificate for good, so it takes new connections."""
    pki, answered = tmp_path / "pki", tmp_path / "answered"
    authority = Authority(pki)
    authority.issue("server", "server", hosts=("127.0.0.1",))
    version = "client.authentication.k8s.io/v1"

    def say(name: str) -> None:
        authority.issue(name, name)
        status = {
            "clientCertificateData": (pki / f"{name}.crt").read_text(),
            "clientKeyData": (pki / f"{name}.key").read_text(),
        }
        answered.write_text(
            json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
        )

    shown: list[str] = []
    running = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        subject = dict(part[0] for part in request.transport.get_extra_info("peercert")["subject"])
        shown.append(subject["commonName"])
        if request.path.endswith("/slow"):
            await running.wait()
            return web.json_response(item("slow"))
        return web.json_response(item("a"), status=200 if shown[-1] == good else 401)

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.certificate))
    tls.verify_mode = ssl.CERT_OPTIONAL
    tls.load_cert_chain(pki / "server.crt", pki / "server.key")
    served = Served()
    served.handle = answer
    await served.server.start_server(ssl=tls)
    asked = tmp_path / "asked"
    plugin = tmp_path / "plugin"
    plugin.write_text(f"#!/bin/sh\necho once >> {asked}\ncat {answered}\n")
    plugin.chmod(0o755)
    cluster = {"server": served.url, "certificate-authority": str(authority.certificate)}
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"exec": {"apiVersion": version, "command": str(plugin)}}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    good = "one"
    say("one")
    api = ApiServer(await find_access(tmp_path / "config"), trust_env=False)
    await api.get(SLOTS, "a")
    slow = asyncio.create_task(api.get(SLOTS, "slow"))
    await until(lambda: len(shown) == 2)
    good = "two"
    say("two")
    await asyncio.gather(*(api.get(SLOTS, "a") for _ in range(3)))
    assert shown[:2] == ["one", "one"]
    assert shown[-1] == "two"
    assert len(asked.read_text().split()) == 2, "one of three that were refused renews for all"
    running.set()
    assert (await slow)["metadata"]["name"] == "slow", "what was under way is not cut off"
    good = "three"
    say("three")
    await api.get(SLOTS, "a")
    assert shown[-1] == "three"
    await api.close()
    await served.server.close()


async def test_a_listing_is_of_all_its_pages_and_its_items_say_their_kind(
    served: Served, api: ApiServer
) -> None:
    answers = [page(item("a"), more="next"), page(item("b"))]
    served.handle = lambda _request: answers.pop(0)
    items, version = await api.list(SLOTS, "team", labels="a=b", fields="c!=d", page=1)
    assert [one["metadata"]["name"] for one in items] == ["a", "b"]
    assert {(one["apiVersion"], one["kind"]) for one in items} == {
        ("rose-gpu.dev/v1alpha1", "RolloutSlot")
    }
    assert version == 7
    asked = {"labelSelector": "a=b", "fieldSelector": "c!=d", "limit": "1"}
    assert [dict(one.query) for one in served.asked] == [asked, asked | {"continue": "next"}]
    assert served.asked[0].headers["Authorization"] == "Bearer word"


async def test_writes_say_in_whose_name_they_are_and_what_they_are(
    served: Served, api: ApiServer
) -> None:
    bodies: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json() if request.can_read_body else None)
        return web.json_response(item("a"))

    served.handle = answer
    manifest = {"metadata": {"name": "a", "namespace": "team"}}
    await api.create(SLOTS, manifest, dry_run=True)
    await api.replace(SLOTS, manifest)
    await api.apply(SLOTS, manifest, "status")
    await api.merge(SLOTS, "a", {"spec": {"x": None}})
    await api.delete(SLOTS, "a", "team")
    own = {"fieldManager": "me"}
    asked = [
        (one.method, one.path.split("/namespaces/")[1], dict(one.query)) for one in served.asked
    ]
    assert asked == [
        ("POST", "team/rolloutslots", own | {"dryRun": "All"}),
        ("PUT", "team/rolloutslots/a", own),
        ("PATCH", "team/rolloutslots/a/status", own | {"force": "true"}),
        ("PATCH", "default/rolloutslots/a", own),
        ("DELETE", "team/rolloutslots/a", {}),
    ]  # fmt: skip
    assert [one.content_type for one in served.asked[2:4]] == [
        "application/apply-patch+yaml",
        "application/merge-patch+json",
    ]
    whole = {"apiVersion": "rose-gpu.dev/v1alpha1", "kind": "RolloutSlot"} | manifest
    assert bodies == [whole, whole, whole, {"spec": {"x": None}}, None]


async def test_an_error_says_what_the_server_says_of_it(served: Served, api: ApiServer) -> None:
    status = {"kind": "Status", "message": "slow down", "details": {"name": "a"}, "code": 429}
    served.handle = lambda _request: web.json_response(
        status, status=429, headers={"Retry-After": "3"}
    )
    with pytest.raises(StatusError, match="429: slow down") as refused:
        await api.get(SLOTS, "a")
    assert (refused.value.code, refused.value.retry_after) == (429, 3.0)
    assert refused.value.details == {"name": "a"}
    served.handle = lambda _request: web.Response(text="upstream", status=503)
    with pytest.raises(StatusError, match="503: Service Unavailable") as plain:
        await api.get(SLOTS, "a")
    assert (plain.value.details, plain.value.retry_after) == ({}, 0.0)


async def test_nobody_there_and_nonsense_are_no_answer(served: Served, api: ApiServer) -> None:
    nobody = ApiServer(access_to(f"http://127.0.0.1:{free_port()}"), trust_env=False)
    with pytest.raises(Unavailable, match="Connect"):
        await nobody.get(SLOTS, "a")
    await nobody.close()
    served.handle = lambda _request: web.Response(text="<html>", content_type="text/html")
    with pytest.raises(Unavailable):
        await api.get(SLOTS, "a")


async def test_a_server_that_is_silent_has_not_answered(served: Served) -> None:
    given_up = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await given_up.wait()
        return response

    served.handle = silent
    api = ApiServer(access_to(served.url), seconds=0.05, trust_env=False)
    with pytest.raises(Unavailable):
        await api.get(SLOTS, "a")
    given_up.set()
    await api.close()


def lines(
    *changes: object,
    cut: bytes = b"",
    seconds: float = 0.0,
    closing: asyncio.Event | None = None,
) -> Handle:
    """A watch that brings these and ends, after seconds or an event."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for one in changes:
            await response.write(json.dumps(one).encode() + b"\n")
        await response.write(cut)
        await asyncio.sleep(seconds)
        if closing is not None:
            await closing.wait()
        return response

    return answer


def in_turn(*handles: Handle) -> Handle:
    """One request after the other."""
    left = list(handles)

    def handle(request: web.Request) -> Any:  # noqa: ANN401  # as a Handle
        return left.pop(0)(request)

    return handle


async def names(api: ApiServer, version: int, count: int) -> list[str]:
    """Of the first changes; the watch goes on after them."""
    async with contextlib.aclosing(api.watch(NODES, version)) as changes:
        return [(await anext(changes))[1]["metadata"]["name"] for _ in range(count)]


async def watched(api: ApiServer, version: int) -> list[tuple[str, str]]:
    changes = api.watch(NODES, version, fields="spec.unschedulable=true")
    return [(what, raw["metadata"]["name"]) async for what, raw in changes]


async def test_a_watch_begins_after_a_version_and_ends_when_the_server_closes_it(
    served: Served, api: ApiServer
) -> None:
    added = {"type": "ADDED", "object": item("a", 8)}
    served.handle = lines(added, {"type": "DELETED", "object": item("a", 9)})
    assert await watched(api, 7) == [("ADDED", "a"), ("DELETED", "a")]
    (asked,) = served.asked
    assert asked.query["resourceVersion"] == "7"
    assert asked.query["watch"] == "true"
    assert asked.query["fieldSelector"] == "spec.unschedulable=true"
    assert asked.query["allowWatchBookmarks"] == "true"
    assert int(asked.query["timeoutSeconds"]) + ANSWER_SECONDS == 60


async def test_a_version_that_is_too_old_is_told_and_not_tried_again(
    served: Served, api: ApiServer
) -> None:
    gone = {"code": 410, "reason": "Expired", "message": "too old resource version"}
    served.handle = lines({"type": "ERROR", "object": gone})
    with pytest.raises(StatusError, match="too old") as told:
        await watched(api, 7)
    assert told.value.code == 410
    served.handle = lambda _request: web.json_response(gone, status=410)
    with pytest.raises(StatusError, match="too old") as refused:
        await watched(api, 7)
    assert refused.value.code == 410
    assert len(served.asked) == 2


async def test_a_watch_that_is_cut_off_within_a_line_has_brought_no_change(
    served: Served, api: ApiServer
) -> None:
    served.handle = lines({"type": "ADDED", "object": item("a")}, cut=b'{"type": "ADD')
    changes = api.watch(NODES, 7)
    assert (await anext(changes))[0] == "ADDED"
    with pytest.raises(Unavailable):
        await anext(changes)


@pytest.mark.parametrize(
    "line",
    [
        {"type": "ERROR", "object": {"kind": "Status", "message": "a status may lack its reason"}},
        {"kind": "Status", "message": "no event"},
        [],
    ],
    ids=["no reason", "no event", "no object"],
)
async def test_a_line_that_is_no_event_ends_a_watch_as_a_broken_connection_does(
    served: Served, api: ApiServer, line: object
) -> None:
    served.handle = lines({"type": "ADDED", "object": item("a")}, line)
    with pytest.raises(Unavailable):
        await watched(api, 7)


async def test_a_watch_that_the_server_ends_in_time_goes_on_from_its_bookmark(
    served: Served,
) -> None:
    """Nothing is listed for it."""
    bookmark = {"type": "BOOKMARK", "object": item("", 70)}
    lives = [
        lines({"type": "ADDED", "object": item("a", 8)}, bookmark, seconds=1.05),
        lines({"type": "ADDED", "object": item("b", 71)}, seconds=1.05),
        lines({"type": "ADDED", "object": item("c", 72)}),
    ]
    served.handle = in_turn(*lives)
    api = ApiServer(access_to(served.url), watch_seconds=1, trust_env=False)
    assert await names(api, 7, 3) == ["a", "b", "c"]
    assert [one.query["resourceVersion"] for one in served.asked] == ["7", "70", "71"]
    assert {one.query["watch"] for one in served.asked} == {"true"}
    await api.close()


async def test_a_watch_whose_connection_died_unseen_is_asked_for_anew_in_time(
    served: Served,
) -> None:
    given_up = asyncio.Event()
    lives = [
        lines({"type": "ADDED", "object": item("a", 8)}, closing=given_up),
        lines({"type": "ADDED", "object": item("b", 9)}),
    ]
    served.handle = in_turn(*lives)
    api = ApiServer(access_to(served.url), seconds=1.0, watch_seconds=1, trust_env=False)
    assert await names(api, 7, 2) == ["a", "b"]
    assert [one.query["resourceVersion"] for one in served.asked] == ["7", "8"]
    given_up.set()
    await api.close()


async def test_a_watch_that_cannot_begin_is_not_tried_for_ever() -> None:
    nobody = ApiServer(access_to(f"http://127.0.0.1:{free_port()}"), trust_env=False)
    with pytest.raises(Unavailable):
        await watched(nobody, 7)
    await nobody.close()
