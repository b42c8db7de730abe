"""Anthropic's own SDK: a loop of calls, every second answer streamed."""

import os
import subprocess

import anthropic

client = anthropic.Anthropic(
    base_url=os.environ["ROSE_URL"], api_key=os.environ["ROSE_KEY"], max_retries=4
)
TOOLS = [
    {
        "name": "bash",
        "description": "Run a command.",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
]
talk = [{"role": "user", "content": "Look into a.txt"}]
for number in range(9):
    asked = {"model": "policy", "max_tokens": 4000, "messages": talk, "tools": TOOLS}
    if number % 2:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    talk.append({"role": "assistant", "content": [one.model_dump() for one in answer.content]})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        done = subprocess.run(call.input["command"], shell=True, capture_output=True, text=True)
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
    talk.append({"role": "user", "content": results})
print(answer.content[-1].text)
