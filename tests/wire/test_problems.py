"""A wrong file is told in one line that names the place in it."""

from pathlib import Path

import pydantic
import pytest
import yaml

from rose_wire import problems


class Gpu(pydantic.BaseModel):
    uuid: str
    memory: int


class File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    gpus: tuple[Gpu, ...] = ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus: [\n", "line 2 is no YAML: "),
        ("a: b: c\n", "line 1 is no YAML: "),
        ("word\n", "expected a YAML mapping, found str"),
        ("gpus: [{uuid: a, memory: much}]\n", "gpus.0.memory: Input should be a valid integer"),
        ("gpus: [{}]\n", "gpus.0.uuid: Field required (and 1 more)"),
        ("gpu: []\n", "gpu: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_file_is_told_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(problems.FILE_ERRORS) as raised:
        File.model_validate(yaml.safe_load(file.read_text()))
    line = problems.of_file(raised.value)
    assert message in line
    assert "\n" not in line


def test_a_file_that_is_not_there_or_no_text_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(problems.FILE_ERRORS) as raised:
        (tmp_path / "none").read_text()
    assert problems.of_file(raised.value) == "No such file or directory"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(problems.FILE_ERRORS) as undecoded:
        (tmp_path / "binary").read_text(encoding="utf-8")
    assert problems.of_file(undecoded.value).startswith("holds no text: byte 0")
