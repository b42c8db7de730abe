"""LangChain's models with a bound tool: ``openai`` or ``anthropic``."""

import os
import subprocess
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

URL, KEY = os.environ["ROSE_URL"], os.environ["ROSE_KEY"]


@tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


if sys.argv[1] == "anthropic":
    from langchain_anthropic import ChatAnthropic

    made = ChatAnthropic(model="policy", base_url=URL, api_key=KEY, max_retries=4, max_tokens=4000)
else:
    from langchain_openai import ChatOpenAI

    made = ChatOpenAI(model="policy", base_url=URL + "/v1", api_key=KEY, max_retries=4)
model = made.bind_tools([bash])
talk = [HumanMessage("Look into a.txt")]
while (answer := model.invoke(talk)).tool_calls:
    talk.append(answer)
    talk += [
        ToolMessage(bash.invoke(one["args"]), tool_call_id=one["id"]) for one in answer.tool_calls
    ]
print(answer.text if isinstance(answer.text, str) else answer.text())
