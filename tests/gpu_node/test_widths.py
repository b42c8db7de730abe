"""Replicas of one, two and eight GPUs: which GPUs, how much memory, why it may be lent or not."""

from __future__ import annotations

import pytest

from rose_core.api.reasons import Reason
from tests.gpu_node.lending import MARKS, Lending
from tests.gpu_node.serving_pods import GIB

pytestmark = [*MARKS, pytest.mark.long]

HEADROOM = 6 * GIB  # of a static pool that has been watched for less than an hour


def room(lending: Lending, index: int) -> int:
    """What may be lent of a GPU, as docs/devices.md has the sum."""
    raw = lending.state.gpus[index].raw
    return int(raw.memory_total - raw.memory_used - HEADROOM)


def test_replicas_of_one_and_two_gpus_have_the_memory_of_theirs(lending: Lending) -> None:
    uuids = [gpu.uuid for gpu in lending.state.gpus]
    for pod in lending.pods:
        reported = lending.devices()[pod.name]
        assert (reported["proof"], reported["refusal"]) == ("Allocated", "")
        assert reported["class"] == "h100-80gb-hbm3"
        assert sorted(reported["gpus"]) == sorted(uuids[index] for index in pod.gpus)
        assert reported["lendableBytes"] == min(room(lending, index) for index in pod.gpus)


def test_a_slot_of_two_gpus_takes_both_of_a_replica_that_has_them(lending: Lending) -> None:
    (wide,) = (pod for pod in lending.pods if len(pod.gpus) == 2)
    lending.renew_lease(gpusPerSlot=2)
    lending.wait(lambda: lending.lent() == {wide.name}, "an engine over two GPUs")
    assert lending.slots()[wide.name][1] == wide.gpus
    assert "5 TooFewGPUs" in lending.why()
    lending.renew_lease()
    lending.wait_for_all()


def test_a_replica_of_eight_has_the_memory_of_its_tightest(installed: Lending) -> None:
    installed.serve(chat_8=1)
    (pod,) = installed.pods
    assert pod.gpus == tuple(range(8))
    installed.wait_for_all()
    tight = installed.state.gpus[3]
    tight.start(pod.pid, 10 * GIB)
    installed.wait(
        lambda: installed.devices().get(pod.name, {}).get("lendableBytes") == room(installed, 3),
        "the memory of GPU 3",
    )
    reported = installed.devices()[pod.name]["lendable"]
    assert reported.startswith(f"the tightest of 8 GPUs, {tight.uuid}: ")


def test_a_replica_of_eight_is_taken_back_when_one_of_them_fails(installed: Lending) -> None:
    (pod,) = installed.pods
    installed.state.gpus[5].raw.mig_current = 1
    installed.wait(lambda: Reason.MIG_ENABLED.value in installed.why(), "the lease says so")
    assert installed.words()[pod.name] == "MigEnabled"
    installed.state.gpus[5].raw.mig_current = 0
