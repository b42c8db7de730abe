"""OpenAI's agents SDK: its own loop, over Responses or over chats."""

import asyncio
import os
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(
    base_url=os.environ["ROSE_URL"] + "/v1", api_key=os.environ["ROSE_KEY"], max_retries=4
)


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


kind = OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatCompletionsModel
model = kind(model="policy", openai_client=client)
agent = Agent(name="reader", instructions="Be brief.", tools=[bash], model=model)
print(asyncio.run(Runner.run(agent, "Look into a.txt")).final_output)
