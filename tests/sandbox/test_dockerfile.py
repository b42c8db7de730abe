"""What is played of a task's Dockerfile, and what is refused by name."""

from __future__ import annotations

import pytest

from rose_sandbox.adapters.dockerfile import Plan, Step, UnknownInstruction, plan

FILE = r"""# A task's.
FROM ubuntu:24.04
ENV LEVEL=3 NAME="a b"
ENV OLD of before
WORKDIR /app
COPY data.txt more /in/
RUN apt-get -v && \
    echo done
WORKDIR sub
COPY . .
RUN ["touch", "a b"]
RUN [ -d "$HOME" ] || echo $((1<<2))
CMD ["bash"]
"""


def test_steps_are_played_where_the_file_stands() -> None:
    assert plan(FILE) == Plan(
        (
            Step("/app", "true"),
            Step("/app", copies=("data.txt", "more"), target="/in/"),
            Step("/app", "apt-get -v &&      echo done"),
            Step("/app/sub", "true"),
            Step("/app/sub", copies=(".",), target="/app/sub/"),
            Step("/app/sub", "touch 'a b'"),
            Step("/app/sub", '[ -d "$HOME" ] || echo $((1<<2))'),
        ),
        {"LEVEL": "3", "NAME": "a b", "OLD": "of before"},
        "/app/sub",
    )


def test_without_a_folder_of_its_own_commands_start_where_the_sandboxs_do() -> None:
    assert plan("FROM scratch\n") == Plan()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ADD https://example.org/a /a", "ADD cannot be played"),
        ("USER agent", "USER cannot be played"),
        ("RUN --mount=type=cache,target=/c make", "no mounts"),
        ("RUN <<END", "no here-documents"),
        ("RUN cat <<'END' > /a", "no here-documents"),
        ("COPY <<END /a", "no here-documents"),
        ("COPY", "plain names"),
        ("ENV PATH=/opt/bin:$PATH", "no variables"),
        ("WORKDIR ${HOME}", "no variables"),
        ("FROM debian AS second", "a second stage"),
        ("COPY --from=build /a /a", "plain names"),
        ("COPY *.py /app/", "plain names"),
    ],
)
def test_what_cannot_be_played_is_named(line: str, words: str) -> None:
    with pytest.raises(UnknownInstruction, match=words):
        plan(f"FROM base\n{line}\n")
