"""What each client makes of a prompt beyond the context, one line each."""

import os

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

URL, KEY = os.environ["ROSE_URL"], os.environ["ROSE_KEY"]
V1 = URL + "/v1"
TEXT = "Look. " * 4000
TALK = [{"role": "user", "content": TEXT}]
lang = {"model": "policy", "api_key": KEY, "max_retries": 2}
sdk = openai.OpenAI(base_url=V1, api_key=KEY)


def told(name, ask):
    try:
        ask()
    except Exception as error:  # noqa: BLE001  # which it is, is the question
        code = getattr(error, "code", None)
        print(f"{name}: {type(error).__name__} {code}")
    else:
        print(f"{name}: nothing")


for provider, base in (("openai", V1), ("anthropic", URL)):
    told(
        f"litellm {provider}",
        lambda provider=provider, base=base: litellm.completion(
            model=f"{provider}/policy", messages=TALK, api_base=base, api_key=KEY, max_tokens=8
        ),
    )
told("langchain chat", lambda: ChatOpenAI(base_url=V1, **lang).invoke(TEXT))
told(
    "langchain responses",
    lambda: ChatOpenAI(base_url=V1, use_responses_api=True, **lang).invoke(TEXT),
)
told(
    "langchain responses, streamed",
    lambda: list(ChatOpenAI(base_url=V1, use_responses_api=True, **lang).stream(TEXT)),
)
told("langchain messages", lambda: ChatAnthropic(base_url=URL, **lang).invoke(TEXT))
told("openai chat", lambda: sdk.chat.completions.create(model="policy", messages=TALK))
told(
    "openai responses, streamed",
    lambda: list(sdk.responses.create(model="policy", input=TEXT, stream=True)),
)
told(
    "anthropic",
    lambda: anthropic.Anthropic(base_url=URL, api_key=KEY).messages.create(
        model="policy", messages=TALK, max_tokens=8
    ),
)
