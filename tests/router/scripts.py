"""What scripted models say to harnesses, and a tokenizer that knows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rose_dev.models import Recipe, make_model, scripted_recipe, successors
from rose_dev.scripted import Script
from rose_router.http.tokenizer.tokenization import Tokenizer


def call(name: str, arguments: str) -> str:
    """A call of a tool, as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BASH = Script(
    "bash",
    (
        "I shall look." + call("bash", '{"command": "echo one > a.txt"}'),
        "<think>Was it written?</think>\nNow read:\n" + call("bash", '{"command": "cat a.txt"}'),
        "The file says one.",
    ),
)
ANY = Script("", ("Hello there, all is well.",))
RECIPE = scripted_recipe("scripted-bash", BASH, ANY)


class Follows:
    """A script as a fake engine takes it."""

    def __init__(self, recipe: Recipe = RECIPE) -> None:
        self._following = successors(recipe)
        self._tokenizer = Tokenizer(folder(recipe))

    def next_token(self, context: Sequence[int]) -> int:
        """What stands next in the answer that the prompt asks for."""
        return self._following[context[-1]]

    def text(self, tokens: Sequence[int]) -> str:
        """As an engine decodes it."""
        return self._tokenizer.decode(tokens)


@cache
def folder(recipe: Recipe = RECIPE) -> Path:
    """The model, with its tokenizer and template."""
    return make_model(recipe)
