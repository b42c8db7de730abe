# mypy: ignore-errors
"""What cannot be started: URL URL."""

import sys
from pathlib import Path

from openenv.core import GenericEnvClient

from rose_sandbox.adapters.openenv import RoseProvider

url = sys.argv[1]


def refused(kind, why, **more):
    provider = RoseProvider(url=more.pop("url", url), token="word", **more.pop("of", {}))
    try:
        GenericEnvClient.from_docker_image(
            more.pop("image", "openenv"), provider=provider, **more
        ).sync()
    except kind as error:
        assert why in str(error), error
        assert provider._thread is None, "nothing is left"
    else:
        raise AssertionError(more)


refused(RuntimeError, "no image none", image="none")
refused(RuntimeError, "name a command (cmd=)")
refused(RuntimeError, "has no openenv.yaml", project=Path.cwd())
refused(RuntimeError, "the server has ended:\nsorry", cmd="echo sorry; exit 3")
refused(RuntimeError, "does not answer", url="http://127.0.0.1:1")
refused(ValueError, "workers: RoseProvider takes cmd and project", workers=2)

half = Path("half")
half.mkdir()
(half / "openenv.yaml").write_text("name: half\n")
refused(RuntimeError, "names no app", project=half)
