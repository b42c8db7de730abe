"""LiteLLM: the same loop with a provider's name before the model's."""

import json
import os
import subprocess
import sys

import litellm

URL, KEY = os.environ["ROSE_URL"], os.environ["ROSE_KEY"]
provider = sys.argv[1]
base = URL + "/v1" if provider == "openai" else URL
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS},
    }
]
talk = [{"role": "user", "content": "Look into a.txt"}]
while True:
    answer = litellm.completion(
        model=f"{provider}/policy",
        messages=talk,
        tools=TOOLS,
        api_base=base,
        api_key=KEY,
        num_retries=4,
        max_tokens=4000,
    )
    message = answer.choices[0].message
    talk.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        command = json.loads(call.function.arguments)["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        talk.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout})
print(message.content)
