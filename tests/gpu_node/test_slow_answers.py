"""A driver that answers slowly: 20 ms a call is a reading of two seconds for eight GPUs."""

from __future__ import annotations

import time

import pytest

from tests.gpu_node.lending import MARKS, Lending

pytestmark = [*MARKS, pytest.mark.long]

ROUNDS = 12


def test_slow_answers_of_all_gpus_take_nothing_back(lending: Lending) -> None:
    names = {pod.name for pod in lending.pods}
    calls = lending.state.total_calls
    lending.state.delay(0.02)
    try:
        for _ in range(ROUNDS):
            assert lending.lent() == names
            assert set(lending.words().values()) == {""}
            time.sleep(1.0)  # several readings pass
    finally:
        lending.state.delay(0.0)
    assert lending.state.total_calls - calls > ROUNDS, "the driver was asked meanwhile"
    assert lending.lent() == names
