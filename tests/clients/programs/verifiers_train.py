"""verifiers' train client: it renders and tokenizes itself, and knows no text of the router's."""

import asyncio
import json
import os
import subprocess

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTION = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}


async def main():
    config = TrainClientConfig(
        base_url=os.environ["ROSE_URL"] + "/v1",
        api_key_var="ROSE_KEY",
        renderer_model_name=os.environ["ROSE_MODEL"],
        renderer={"name": "default", "tool_parser": "qwen3"},
    )
    client, dialect = TrainClient(config), ChatDialect()
    talk = [{"role": "user", "content": "Look into a.txt"}]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        body = {"model": "policy", "messages": talk, "tools": tools}
        answer = await client.get_response(dialect, body, SamplingConfig(), session_id="a-trace")
        message = answer.raw["choices"][0]["message"]
        assert len(answer.tokens.completion_logprobs) == len(answer.tokens.completion_ids) > 0
        talk.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
    await client.close()
    print(message["content"])


asyncio.run(main())
