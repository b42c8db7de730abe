"""OpenAI's own SDK: ``chat``, ``responses`` told whole, or ``responses`` by the one before."""

import json
import os
import subprocess
import sys

import openai

client = openai.OpenAI(
    base_url=os.environ["ROSE_URL"] + "/v1", api_key=os.environ["ROSE_KEY"], max_retries=4
)
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}


def run(arguments):
    command = json.loads(arguments)["command"]
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


def chat():
    talk = [{"role": "user", "content": "Look into a.txt"}]
    tools = [{"type": "function", "function": TOOL}]
    while True:
        message = (
            client.chat.completions.create(model="policy", messages=talk, tools=tools)
            .choices[0]
            .message
        )
        talk.append(
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = run(call.function.arguments)
            talk.append({"role": "tool", "tool_call_id": call.id, "content": content})


def responses(chained):
    given, before = [{"role": "user", "content": "Look into a.txt"}], None
    tools = [{"type": "function", **TOOL}]
    while True:
        with client.responses.stream(
            model="policy", input=given, tools=tools, previous_response_id=before
        ) as stream:
            answer = stream.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        outputs = [
            {"type": "function_call_output", "call_id": one.call_id, "output": run(one.arguments)}
            for one in calls
        ]
        output = [item.model_dump(exclude_none=True) for item in answer.output]
        given = outputs if chained else [*given, *output, *outputs]
        before = answer.id if chained else None


print(chat() if sys.argv[1] == "chat" else responses(sys.argv[1] == "chained"))
