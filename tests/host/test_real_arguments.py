"""Stock SGLang takes every argument that a lease may name, and starts with those of the sample."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from rose_core.api import RolloutLease
from rose_core.api.arguments import ALLOWED
from rose_dev.engine_environment import engine_python
from tests.host.helpers import BEARER, guarding, status_of, stop
from tests.host.real import needed_model, order, ready, syncing_host

pytestmark = pytest.mark.engine

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "rolloutlease.yaml"
_ASK = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([word for action in parser._actions for word in action.option_strings]))
"""


def test_every_argument_on_the_list_is_one_of_sglangs() -> None:
    needed_model()
    output = subprocess.run(
        [engine_python(), "-c", _ASK], capture_output=True, text=True, check=True, timeout=240
    )
    known = set(json.loads(output.stdout.splitlines()[-1]))
    assert {f"--{name}" for name in ALLOWED} <= known


async def test_the_sample_lease_starts_on_real_sglang(rundir: Path) -> None:
    model = needed_model()
    lease = RolloutLease.model_validate(yaml.safe_load(SAMPLE.read_text()))
    asked = order(model, "")
    engine = msgspec.structs.replace(asked.engine, arguments=dict(lease.spec.engine_arguments))
    async with syncing_host(rundir, model.parent) as host:
        with guarding(rundir):
            await host.host.ensure(msgspec.structs.replace(asked, engine=engine))
            await ready(host)
            status = await status_of(host)
            assert status.vocabulary > 0
            body = {"input_ids": [104], "sampling_params": {"max_new_tokens": 2}}
            url = f"{status.endpoint}/generate"
            async with (
                aiohttp.ClientSession() as client,
                client.post(url, json=body, headers=BEARER) as reply,
            ):
                assert reply.status == 200
                assert len((await reply.json())["output_ids"]) == 2
        await host.host.stop(stop())
