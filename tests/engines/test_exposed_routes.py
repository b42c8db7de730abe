"""What an engine answers on its own port: turns and figures; its admin routes are nobody's."""

from __future__ import annotations

from typing import Any

import pytest

from rose_engines.process.exposed_routes import RouteFilter, refusal

KEY = "key-of-this-process"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/update_weights_from_disk"),
        ("POST", "/slow_down"),
        ("POST", "/release_memory_occupation"),
        ("GET", "/start_profile"),
        ("POST", "/configure_logging"),
        ("GET", "/server_info"),  # tells the engine's settings
        ("GET", "/generate"),
        ("GET", "/health_generate"),  # makes a token
        ("POST", "/generate/"),
        ("POST", "//generate"),
    ],
)
@pytest.mark.parametrize("given", ["", f"Bearer {KEY}"])
def test_what_is_not_named_is_not_there_even_with_the_key(
    method: str, path: str, given: str
) -> None:
    assert refusal(method, path, given, KEY) == 404


def test_turns_and_figures_pass() -> None:
    assert refusal("POST", "/generate", "", KEY) == 0
    assert refusal("GET", "/metrics", "", KEY) == 0


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache"])
def test_what_the_host_orders_asks_for_the_key(path: str) -> None:
    assert refusal("POST", path, "", KEY) == 401
    assert refusal("POST", path, "Bearer other", KEY) == 401
    assert refusal("POST", path, f"Bearer {KEY}", KEY) == 0


def test_without_a_key_an_engine_is_as_its_makers_ship_it() -> None:
    assert refusal("POST", "/slow_down", "", "") == 0


class Asked:
    """An ASGI application that remembers what reached it, and what was answered."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.statuses: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        self.paths.append(scope.get("path", scope["type"]))

    async def send(self, message: Any) -> None:  # noqa: ANN401
        if "status" in message:
            self.statuses.append(message["status"])


async def _nothing() -> Any:  # noqa: ANN401
    raise AssertionError("a refused request is not read")


async def test_the_application_never_sees_what_is_refused() -> None:
    asked = Asked()
    doors = RouteFilter(asked, KEY)
    key = [(b"authorization", f"Bearer {KEY}".encode())]
    for scope in (
        {"type": "lifespan"},
        {"type": "http", "method": "POST", "path": "/generate", "headers": []},
        {"type": "http", "method": "POST", "path": "/slow_down", "headers": key},
        {"type": "http", "method": "POST", "path": "/abort_request", "headers": []},
        {"type": "http", "method": "POST", "path": "/abort_request", "headers": key},
        {"type": "websocket", "path": "/v1/realtime", "headers": key},
    ):
        await doors(scope, _nothing, asked.send)
    assert asked.paths == ["lifespan", "/generate", "/abort_request"]
    assert asked.statuses == [404, 401]


async def test_what_sglang_tells_itself_once_it_is_warm_passes_once() -> None:
    asked = Asked()
    doors = RouteFilter(asked, KEY)
    for _ in range(2):
        scope = {"type": "http", "method": "POST", "path": "/freeze_gc", "headers": []}
        await doors(scope, _nothing, asked.send)
    assert asked.paths == ["/freeze_gc"]
    assert asked.statuses == [404]
