# mypy: ignore-errors
"""An episode by OpenEnv's own client: PROJECT URL URL [ROUTER]. Says ``KILL``, waits for a line."""

import logging
import sys

import requests
from counter import CounterAction, CounterEnv

from rose_sandbox.adapters.openenv import RoseProvider

logging.basicConfig(level="INFO")
project, one, two, *routers = sys.argv[1:]
way = {"router": routers[0], "router_token": "turns"} if routers else {"others": [two]}
provider = RoseProvider(project=project, url=one, token="word", session="episode", **way)
env = CounterEnv.from_docker_image("openenv", provider=provider, env_vars={"UNIT": "euro"}).sync()
try:
    env.reset(episode_id="seven")
    for step in range(1, 6):
        if step == 4:
            if routers:  # who says when to save
                provider.checkpoint()
            print("KILL", flush=True)
            sys.stdin.readline()
        made = env.step(CounterAction(message="x" * step))
        assert made.observation.echoed_message == "x" * step, made
        assert made.observation.metadata["step"] == step, made
    state = env.state()
    assert (state.episode_id, state.step_count) == ("seven", 5), state
    schema = requests.get(f"{env.base_url}/schema", timeout=60).json()
    assert "message" in schema["action"]["properties"], schema
    unit = provider.call(provider.box.run("tr '\\0' '\\n' </proc/1/environ | grep UNIT"))
    assert unit.stdout == b"UNIT=euro\n", unit
finally:
    env.close()
provider.stop_container()
