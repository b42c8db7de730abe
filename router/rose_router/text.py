"""Text in and out, only where the lease brings a tokenizer; token ids are the truth.

A chat template is the model's own (``chat_template.jinja`` or ``tokenizer_config.json`` beside the
tokenizer). It came with the model, so it runs in jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rose_router.errors import BadRequest

if TYPE_CHECKING:
    import jinja2


class Tokenizer:
    """A ``tokenizer.json``.

    Args:
        path: the file, or the folder it stands in.

    Raises:
        BadRequest: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers  # noqa: PLC0415  # only where text is asked for

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            message = f"{file}: no such tokenizer; --tokenizer wants a tokenizer.json or its folder"
            raise BadRequest("NoTokenizer", message)
        self._folder = file.parent
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Text to token ids, by default with the special tokens the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Token ids to text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    def chat(
        self, messages: Sequence[Any], tools: Sequence[Any], more: Mapping[str, Any]
    ) -> list[int]:
        """A conversation as the prompt of the next answer, in the model's own template.

        Args:
            messages: as in OpenAI's request.
            tools: likewise.
            more: further variables of the template (``chat_template_kwargs``).

        Raises:
            BadRequest: the model has no template, or it refuses the messages.
        """
        template = self._template
        if template is None:
            message = f"{self._folder}: the model has no chat template; send token ids as input_ids"
            raise BadRequest("NoTemplate", message)
        import jinja2  # noqa: PLC0415  # only where a chat is asked for

        names = {"add_generation_prompt": True, **self._special, **more}
        try:
            text = template.render(messages=messages, tools=list(tools) or None, **names)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise BadRequest("InvalidTurn", message) from error
        return self.encode(text, special=False)

    @cached_property
    def _config(self) -> dict[str, Any]:
        file = self._folder / "tokenizer_config.json"
        found: Any = json.loads(file.read_text()) if file.is_file() else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def _special(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            found[name] = str(value.get("content", "")) if isinstance(value, dict) else value or ""
        return found

    @cached_property
    def _template(self) -> jinja2.Template | None:
        file = self._folder / "chat_template.jinja"
        text = file.read_text() if file.is_file() else self._config.get("chat_template")
        if isinstance(text, list):  # several by name; the default one is asked for
            text = next((one["template"] for one in text if one.get("name") == "default"), None)
        if not isinstance(text, str):
            return None
        from jinja2.ext import loopcontrols  # noqa: PLC0415  # only where a chat is asked for
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(text)


def _to_json(value: object, indent: int | None = None) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
