"""The bill of materials names everything that is installed."""

from __future__ import annotations

import importlib.metadata

from rose_cli.sbom import document


def test_every_distribution_is_listed_once_with_version_and_hash() -> None:
    found = document()
    assert found["metadata"]["component"]["name"] == "rose-gpu"
    listed = [item["name"] for item in found["components"]]
    assert len(listed) == len(set(listed))
    assert {"python", "grpcio", "pydantic"} <= set(listed)
    (grpcio,) = [item for item in found["components"] if item["name"] == "grpcio"]
    assert grpcio["version"] == importlib.metadata.version("grpcio")
    assert grpcio["purl"] == f"pkg:pypi/grpcio@{grpcio['version']}"
    assert len(grpcio["hashes"][0]["content"]) == 64


def test_a_licence_is_given_where_the_distribution_states_one() -> None:
    licences = {item["name"]: item.get("licenses") for item in document()["components"]}
    assert licences["numpy"]
