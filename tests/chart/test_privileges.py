"""What the chart grants is what ``docs/granted.md`` says, to the line."""

from __future__ import annotations

import pytest

from tests.chart.privileges import PAGE, granted, page
from tests.chart.rendering import HELM

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")


def test_no_right_is_granted_that_the_page_does_not_list() -> None:
    assert page() == PAGE.read_text(), "python -m tests.chart.privileges writes it"


def test_by_default_nothing_is_privileged() -> None:
    assert [line for line in granted({}) if "is privileged" in line or "has SYS_" in line] == []
