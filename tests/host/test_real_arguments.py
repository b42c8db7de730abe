"""Stock SGLang takes every argument that a lease may name.

Each engine of the tests beside this one starts with those of the sample (``tests.host.real``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose_core.api.arguments import ALLOWED
from rose_dev.engine_testing import ended_well, start_beside_engines
from tests.host.real import needed_model

pytestmark = pytest.mark.engine

_ASK = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([word for action in parser._actions for word in action.option_strings]))
"""


def test_every_argument_on_the_list_is_one_of_sglangs(tmp_path: Path) -> None:
    needed_model()
    program, log = tmp_path / "ask.py", tmp_path / "log"
    program.write_text(_ASK)
    ended_well({log: start_beside_engines(program, [], log)}, 240)
    known = set(json.loads(log.read_text().splitlines()[-1]))
    assert {f"--{name}" for name in ALLOWED} <= known
