"""verifiers' train client: it renders and tokenizes itself, and knows no text of the router's."""

import asyncio
import json
import os
import re
import subprocess

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main():
    config = TrainClientConfig(
        base_url=os.environ["ROSE_URL"] + "/v1",
        api_key_var="ROSE_KEY",
        renderer_model_name=os.environ["ROSE_MODEL"],
        renderer={"name": "default"},
    )
    client, dialect = TrainClient(config), ChatDialect()
    talk = [{"role": "user", "content": "Look into a.txt"}]
    while True:
        body = {"model": "policy", "messages": talk}
        answer = await client.get_response(dialect, body, SamplingConfig(), session_id="a-trace")
        message = answer.raw["choices"][0]["message"]
        assert len(answer.tokens.completion_logprobs) == len(answer.tokens.completion_ids) > 0
        talk.append(message)
        # Its parsers of calls want special tokens, which this model has not.
        called = re.search(r"<tool_call>(.*)</tool_call>", message["content"], re.DOTALL)
        if called is None:
            break
        command = json.loads(called[1])["arguments"]["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        talk.append({"role": "user", "content": done.stdout})
    await client.close()
    print(message["content"])


asyncio.run(main())
