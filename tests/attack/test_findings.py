"""The findings in ``findings.yaml`` name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FINDINGS = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text())
NAMED = [(one["finding"], test) for one in FINDINGS for test in one["tests"]]
# Something was never met: there is no fault to put back.
WITHOUT_FAULT = {
    "no network policy was ever enforced",
    "cert-manager was never met",
    "no kernel with cgroup v2 was ever met",
}


@pytest.mark.parametrize(("finding", "test"), NAMED)
def test_a_finding_has_its_test(finding: str, test: str) -> None:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    wanted = rf"{name}\b" if name else "test_"
    assert re.search(rf"^(async )?def {wanted}", text, re.MULTILINE)


def test_every_finding_is_written_as_the_others_are() -> None:
    for one in FINDINGS:
        assert set(one) - {"seenToFailWith"} == {"finding", "tests"}
        assert one["tests"]
    assert {one["finding"] for one in FINDINGS if not one.get("seenToFailWith")} == WITHOUT_FAULT


def test_every_test_of_the_node_is_a_finding() -> None:
    """But for the party's rights, which are the table's and no finding."""
    text = Path(__file__).with_name("test_on_the_node.py").read_text()
    there = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
    assert there - {test.partition("::")[2] for _, test in NAMED} == {
        "test_the_api_server_lets_a_tenant_do_what_the_table_says_and_in_its_namespace_alone",
        "test_a_value_that_is_none_of_the_arguments_is_refused_before_any_engine",
        "test_the_api_server_gives_a_router_nothing",
    }
