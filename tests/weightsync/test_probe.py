"""The fixed-prompt probe between a real store, a real host and the fake engine."""

from __future__ import annotations

from pathlib import Path

from rose_agent.weightsync import metrics
from rose_core.delta.probe import PROMPT, ProbeOutcome
from rose_core.identity import WeightVersion
from rose_engines.fake.model import prompt_logprobs
from rose_weights.receive.client import WeightsClient
from tests.host.helpers import until
from tests.weightsync.test_follower import World, world


def right_answer(version: str) -> list[float]:
    return [value for value in prompt_logprobs(PROMPT, version) if value is not None]


def outcomes(outcome: ProbeOutcome) -> float:
    return float(metrics.PROBES.labels(outcome=outcome)._value.get())


def differences() -> dict[str, float]:
    [family] = metrics.PROBE_DIFFERENCE.collect()
    return {sample.labels["slot"]: sample.value for sample in family.samples}


async def write_probe(
    here: World, digest: str, answer: list[float], holder: str = "trainer"
) -> None:
    async with WeightsClient(here.address, holder=holder) as client:
        version = WeightVersion.parse("grpo@1.0")
        result = await client.compare(version, digest, answer, trainer=holder == "trainer")
        assert result.known


async def test_an_engine_that_computes_something_else_is_quarantined_until_it_does_not(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        manifest = await here.run.publish()
        right = right_answer("grpo@1.0")
        await write_probe(here, manifest.digest, [value - 1.0 for value in right])
        quarantined = metrics.QUARANTINES._value.get()
        here.sync()
        file = await here.write("fixed prompt at grpo@1.0 are 1 nats off")
        assert "compared with the trainer" in file.error
        assert (file.version, file.attested) == ("", False)
        assert metrics.QUARANTINES._value.get() > quarantined

        settled = outcomes(ProbeOutcome.RIGHT)
        await write_probe(here, manifest.digest, right)

        async def good() -> bool:
            return outcomes(ProbeOutcome.RIGHT) > settled and here.weights.attested

        await until(good, "the engine was filled again and answers as the trainer")
        assert (await here.serves("grpo@1.0")).error == ""
        assert differences() == {"slot-1": 0.0}
        await here.stop_sync()
        assert differences() == {}  # or the alert would go on about an engine that is gone


async def test_an_engine_alone_is_believed_and_its_answer_is_kept_for_the_next(
    rundir: Path, models: Path, tmp_path: Path
) -> None:
    async with world(rundir, models, tmp_path / "store") as here:
        manifest = await here.run.publish()
        alone = outcomes(ProbeOutcome.ALONE)
        here.sync()

        async def asked() -> bool:
            return outcomes(ProbeOutcome.ALONE) > alone

        await until(asked, "the engine was probed")
        assert here.weights.attested
        async with WeightsClient(here.address, holder="another") as client:
            received = await client.compare(manifest.target, manifest.digest, [])
        assert received.others == (tuple(right_answer("grpo@1.0")),)
        assert received.trainer == ()
