"""What is wrong with a file that a person wrote, in one line: the place in it, and why.

A parser's own words run over several lines and name what the person never saw (a string, a class).
Callers put the file and the flag that named it before the line. Next step: ``flags`` tells a wrong
flag.
"""

from __future__ import annotations

import pydantic
import yaml

FILE_ERRORS = (OSError, UnicodeDecodeError, yaml.YAMLError, pydantic.ValidationError)
"""What reading a YAML file into a model can raise."""


def of_file(error: Exception) -> str:
    """One of ``FILE_ERRORS`` as a line without the file's name."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"holds no text: byte {error.start} is none of UTF-8"
    if isinstance(error, pydantic.ValidationError):
        return _of_model(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1} is no YAML: {error.problem}"
    return str(error).splitlines()[0]


def _of_model(error: pydantic.ValidationError) -> str:
    first, others = error.errors()[0], error.error_count() - 1
    where = ".".join(map(str, first["loc"]))
    if not where and not isinstance(first["input"], dict):
        return f"expected a YAML mapping, found {type(first['input']).__name__}"
    place = f"{where}: " if where else ""  # a rule over several fields has no place of its own
    return f"{place}{first['msg']}" + (f" (and {others} more)" if others else "")
