"""Settings from files and flags, and the router objects they shape."""

from pathlib import Path

import pytest

from rose_operator import routers
from rose_operator.errors import ConfigurationError
from rose_operator.settings import parse


def test_router_names_are_unique_and_short_enough() -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b.c"), ("a", "b"), ("n" * 63, "l" * 253)]
    names = [routers.router_name(*pair) for pair in pairs]
    assert len(set(names)) == len(pairs)
    assert all(len(name) <= 63 for name in names)
    assert routers.router_name("research", "grpo-main") == "router-research-grpo-main"


def test_a_router_template_extends_the_pod() -> None:
    base = {"volumes": [{"name": "token"}], "a": {"b": 1, "c": 2}}
    extra = {"volumes": [{"name": "engine"}], "a": {"b": 3}, "d": 4}
    assert routers.merge(base, extra) == {
        "volumes": [{"name": "token"}, {"name": "engine"}],
        "a": {"b": 3, "c": 2},
        "d": 4,
    }


def flags(folder: Path, stores: str, token: str) -> list[str]:
    (folder / "stores.yaml").write_text(stores)
    (folder / "token").write_text(token)
    return [
        "--router-image=x",
        f"--stores-file={folder / 'stores.yaml'}",
        f"--token-file={folder / 'token'}",
    ]


def test_settings_from_files(tmp_path: Path) -> None:
    found = parse(flags(tmp_path, "main: store.example:7446\n", "secret\n"))
    assert found.stores == {"main": "store.example:7446"}
    assert found.token == "secret"


@pytest.mark.parametrize(
    ("stores", "token", "text"),
    [
        ("main: nowhere\n", "t", "expected host:port"),
        ("- main\n", "t", "expected a YAML mapping"),
        ("{", "t", "stores.yaml"),
        ("main: a:1\n", " \n", "is empty"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, stores: str, token: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse(flags(tmp_path, stores, token))
