"""What KEDA hears: its own methods over real gRPC, of a gateway whose rewards wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml

from rose_rewards import keda, metrics
from rose_rewards.gateway import Reward
from rose_rewards.main import running
from rose_wire.ports import free_port
from tests.chart.rendering import HELM, render

MESSAGES = keda.MESSAGES


async def ask(channel: grpc.aio.Channel, name: str, request: Any, reply: str) -> Any:  # noqa: ANN401
    call = channel.unary_unary(
        f"/{keda.SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=MESSAGES[reply].FromString,
    )
    return await call(request, timeout=10)


async def test_keda_hears_of_the_first_reward_at_once_and_of_how_many_are_wished_for(
    tmp_path: Path,
) -> None:
    listed = {"mine": {"rule": "exact", "team": "a"}, "other": {"rule": "exact", "team": "b"}}
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(listed))
    address = f"127.0.0.1:{free_port()}"
    async with running(tmp_path / "f.yaml", workers=0, target=1.0, scaler_address=address) as (
        gateway,
        _,
    ):
        gateway._demand["a"].times.extend([0.5] * 9)  # as many have taken half a second
        reference = MESSAGES["ScaledObjectRef"](
            name="a", namespace="n", scalerMetadata={"team": "a", "places": "2"}
        )
        async with grpc.aio.insecure_channel(address) as channel:
            stream = channel.unary_stream(
                f"/{keda.SERVICE}/StreamIsActive",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=MESSAGES["IsActiveResponse"].FromString,
            )(reference)
            reported = aiter(stream)
            assert (await anext(reported)).result is False
            asked = [
                asyncio.create_task(
                    gateway.score(Reward(trajectory=f"t{n}", function="mine", answer=""), "a")
                )
                for n in range(8)
            ]
            async with asyncio.timeout(10):
                assert (await anext(reported)).result is True
            found = await ask(channel, "GetMetricSpec", reference, "GetMetricSpecResponse")
            (spec,) = found.metricSpecs
            assert (spec.metricName, spec.targetSizeFloat) == (keda.METRIC, 2.0)
            request = MESSAGES["GetMetricsRequest"](scaledObjectRef=reference)
            (value,) = (
                await ask(channel, "GetMetrics", request, "GetMetricsResponse")
            ).metricValues
            assert (value.metricName, value.metricValueFloat >= 4.0) == (keda.METRIC, True)
            other = MESSAGES["ScaledObjectRef"](scalerMetadata={"team": "b"})
            assert not (await ask(channel, "IsActive", other, "IsActiveResponse")).result
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            stream.cancel()


@pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
async def test_the_charts_own_trigger_brings_the_workers_of_functions_without_a_team(
    tmp_path: Path,
) -> None:
    listed = {"exact": {"rule": "exact"}}
    values = {"rewards": {"enabled": True, "functions": listed}}
    rendered = render(values, "keda.sh/v1alpha1")
    (trigger,) = rendered.one("ScaledObject", "rose-reward-worker-shared")["spec"]["triggers"]
    reference = MESSAGES["ScaledObjectRef"](scalerMetadata=trigger["metadata"])
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(listed))
    address = f"127.0.0.1:{free_port()}"
    async with (
        running(tmp_path / "f.yaml", workers=0, scaler_address=address) as (gateway, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert not (await ask(channel, "IsActive", reference, "IsActiveResponse")).result
        asked = asyncio.create_task(
            gateway.score(Reward(trajectory="t", function="exact", answer=""), "a")
        )
        await asyncio.sleep(0)
        assert (await ask(channel, "IsActive", reference, "IsActiveResponse")).result
        request = MESSAGES["GetMetricsRequest"](scaledObjectRef=reference)
        (value,) = (await ask(channel, "GetMetrics", request, "GetMetricsResponse")).metricValues
        assert value.metricValueFloat == 1.0
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_few_workers_are_wished_for_until_a_group_has_all_its_members(
    tmp_path: Path,
) -> None:
    (tmp_path / "f.yaml").write_text("exact: {rule: exact}")

    def member(number: int) -> Reward:
        return Reward(trajectory=f"t{number}", function="exact", answer="", group="g", members=9)

    async with running(tmp_path / "f.yaml", workers=0, patience=99.0) as (gateway, _):
        gateway._demand[""].times.extend([0.5] * 9)  # as many have taken half a second
        asked = [asyncio.create_task(gateway.score(member(number))) for number in range(8)]
        await asyncio.sleep(0)
        assert gateway.wish(1.0) == 1
        asked.append(asyncio.create_task(gateway.score(member(8))))
        await asyncio.sleep(0)
        assert gateway.wish(1.0) >= 5, "the last one is there, and the nine decide their group"
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
def test_the_chart_tells_the_gateway_how_patient_it_may_be() -> None:
    values = {"rewards": {"enabled": True, "functions": {"exact": {"rule": "exact"}}}}
    pod = render(values).one("Deployment", "rose-rewards")["spec"]["template"]["spec"]
    words = pod["containers"][0].get("args", []) + pod["containers"][0].get("command", [])
    found = {"--target-seconds=10", "--patience-seconds=0", "--cold-start-seconds=1.5"}
    assert found <= set(words)


async def test_the_wish_is_shown_whether_keda_asks_or_not(tmp_path: Path) -> None:
    def shown(team: str) -> float | None:
        return metrics.REGISTRY.get_sample_value("rose_rewards_wish", {"team": team})

    listed = {"mine": {"rule": "exact", "team": "a"}, "everybodys": {"rule": "exact"}}
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(listed))
    async with running(tmp_path / "f.yaml", workers=0) as (gateway, _):
        assert (shown("a"), shown("")) == (0.0, 0.0)
        asked = asyncio.create_task(
            gateway.score(Reward(trajectory="t", function="mine", answer=""), "a")
        )
        await asyncio.sleep(0)
        assert (shown("a"), shown("")) == (1.0, 0.0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert shown("a") is None, "nobody wishes once the gateway has ended"


async def test_a_team_that_is_not_in_the_list_is_no_answer_and_no_series(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("exact: {rule: exact}")
    address = f"127.0.0.1:{free_port()}"
    async with (
        running(tmp_path / "f.yaml", workers=0, scaler_address=address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        reference = MESSAGES["ScaledObjectRef"](scalerMetadata={"team": "stranger"})
        request = MESSAGES["GetMetricsRequest"](scaledObjectRef=reference)
        for name, reported in (("IsActive", reference), ("GetMetrics", request)):
            with pytest.raises(grpc.aio.AioRpcError, match=r"(?s)names one of shared") as found:
                await ask(channel, name, reported, f"{name}Response")
            assert found.value.code() is grpc.StatusCode.NOT_FOUND
        (wishes,) = metrics.WISH.collect()
        assert all(one.labels["team"] != "stranger" for one in wishes.samples)
