"""Agents' SDKs and command-line agents, unmodified, with nothing set but URL and key.

Each plays a task of several turns with its own tools, on two engines of which one is killed in
mid-answer. It runs in a network namespace that has the router and nothing else. ``make
test-clients`` fetches them and runs this.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rose_dev.environments import cache_folder
from rose_dev.models import Recipe, scripted_recipe
from rose_dev.scripted import Script, is_mark, tokens
from rose_dev.waiting import until
from rose_router.http.tokenizer.tokenization import Tokenizer
from tests.clients.alone import join
from tests.router.conftest import Stage
from tests.router.scripts import Follows, call, folder

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

CLIENTS = cache_folder() / "clients"
PROGRAMS = Path(__file__).parent / "programs"
PORT = 8000
SECONDS = 300.0
Staging = Callable[..., AbstractAsyncContextManager[Stage]]


@dataclass(frozen=True)
class Client:
    """One client, and what the model says to it.

    Attributes:
        name: of the client.
        command: the program, and what it is told.
        tool: name of its tool that runs commands.
        calls: arguments of the calls that the model makes.
        last: what it says in the end.
        environment: of its packages.
        prints: what the client prints; empty: what the model says in the end.
        written: answers that it begins every conversation with, as if the model had said them.
    """

    name: str
    command: tuple[str, ...]
    tool: str = "bash"
    calls: tuple[str, ...] = ('{"command": "echo one > a.txt"}', '{"command": "cat a.txt"}')
    last: str = "The file says one."
    written: int = 0
    environment: str = "."
    prints: str = ""

    def answers(self) -> tuple[str, ...]:
        """The model's part."""
        reported = (
            "I shall look. ",
            "<think>Was it written?</think>\nNow it is read. ",
            "And again. ",
        )
        calls = [reported[n] + call(self.tool, one) for n, one in enumerate(self.calls)]
        # A task of the mini agent ends with a call.
        return (*calls, self.last) if self.last else tuple(calls)

    def script(self) -> Script:
        """The same as a model takes it, which counts answers from the conversation's beginning."""
        never = tuple(f"Never said, {n}." for n in range(self.written))
        return Script(self.tool, (*never, *self.answers()))


_DESCRIBED = tuple(
    f'{{"command": "{one}", "description": "{one}"}}' for one in ("echo one > a.txt", "cat a.txt")
)
SDKS = [
    Client("anthropic", ("anthropic_sdk.py",)),
    Client("openai chat", ("openai_sdk.py", "chat")),
    Client("openai responses", ("openai_sdk.py", "whole")),
    Client("openai responses, chained", ("openai_sdk.py", "chained")),
    Client("openai-agents responses", ("openai_agents.py", "responses")),
    Client("openai-agents chat", ("openai_agents.py", "chat")),
    Client("LangChain openai", ("langchain_models.py", "openai")),
    Client("LangChain anthropic", ("langchain_models.py", "anthropic")),
    Client("LiteLLM openai", ("litellm_calls.py", "openai")),
    Client("LiteLLM anthropic", ("litellm_calls.py", "anthropic")),
]
AGENTS = [
    Client(
        "codex",
        ("codex.sh",),
        tool="exec_command",
        calls=('{"cmd": "echo one > a.txt"}', '{"cmd": "cat a.txt"}'),
    ),
    Client(
        "claude",
        ("claude.sh",),
        tool="Bash",
        calls=_DESCRIBED,
    ),
    Client("opencode", ("opencode.sh",), calls=_DESCRIBED),
    Client(
        "qwen",
        ("qwen.sh",),
        tool="run_shell_command",
        calls=tuple(
            f'{{"command": "{one}", "is_background": false}}'
            for one in ("echo one > a.txt", "cat a.txt")
        ),
        written=1,
    ),
    Client(
        "mini",
        ("mini.sh",),
        calls=(
            '{"command": "echo one > a.txt"}',
            '{"command": "cat a.txt"}',
            '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}',
        ),
        last="",
    ),
]


class Watched(Follows):
    """A script that remembers the prompts that it was read."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.prompts: set[tuple[int, ...]] = set()
        self._marks = {i for token, i in tokens(recipe.scripts).items() if is_mark(token)}

    def next_token(self, context: Sequence[int]) -> int:
        """The script's next token; a prompt that ends with a mark is noted."""
        if context[-1] in self._marks:
            self.prompts.add(tuple(context))
        return super().next_token(context)


def search_path() -> str:
    """Where clients' commands are found."""
    return os.pathsep.join(
        [
            *(str(CLIENTS / name) for name in ("npm/node_modules/.bin", "openai2/bin")),
            os.environ["PATH"],
        ]
    )


@asynccontextmanager
async def only_the_router(port: int, socket: Path) -> AsyncIterator[None]:
    """A Unix socket behind which the router stands."""

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, await asyncio.open_connection("127.0.0.1", port))

    server = await asyncio.start_unix_server(taken, str(socket))
    async with server:
        yield


async def play(client: Client, port: int, at: Path, model: Path) -> tuple[int, str]:
    """Run the client, which may read the model's tokenizer; its exit status and what it said."""
    (at / "home").mkdir()
    program = PROGRAMS / client.command[0]
    interpreter = (
        "bash" if program.suffix == ".sh" else str(CLIENTS / client.environment / "bin/python")
    )
    socket = at / "router"
    # Of its own, so that all that it has started ends with it.
    processes = ["--pid", "--fork", "--kill-child", "--mount-proc"]
    alone = [
        "unshare",
        "--net",
        *processes,
        sys.executable,
        str(Path(__file__).with_name("alone.py")),
        str(PORT),
        str(socket),
    ]
    kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
    env = kept | {
        "PATH": search_path(),
        "HOME": str(at / "home"),
        "ROSE_URL": f"http://127.0.0.1:{PORT}",
        "ROSE_KEY": "good",
        "ROSE_MODEL": str(model),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    async with only_the_router(port, socket):
        process = await asyncio.create_subprocess_exec(
            *alone, interpreter, str(program), *client.command[1:],
            cwd=at, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, 9)
    return process.returncode or 0, output.decode(errors="replace")


def installed(client: Client) -> bool:
    """Whether it can be run here."""
    if client.command[0].endswith(".py"):
        return (CLIENTS / client.environment / "bin/python").exists()
    name = client.command[0].removesuffix(".sh")
    return shutil.which(name, path=search_path()) is not None


@dataclass(frozen=True)
class Played:
    """What a client did.

    Attributes:
        turns: of the router, as it tells them.
        rows: of all their sessions.
    """

    turns: list[dict[str, Any]]
    rows: list[dict[str, Any]]


async def play_while_an_engine_dies(
    client: Client, recipe: Recipe, script: Follows, stage: Staging, at: Path
) -> Played:
    """The client's task on two engines, one of which dies in the middle of a later answer."""
    if not installed(client):
        pytest.skip(f"{client.name} is not installed; make test-clients")
    async with stage(tokenizer=folder(recipe), turn_token="good", context_tokens=200_000) as s:
        s.http.headers["Authorization"] = "Bearer good"
        engines = {
            name: await s.engine(name, token_seconds=0.01, script=script) for name in ("a", "b")
        }
        playing = asyncio.create_task(play(client, s.router.http_port, at, folder(recipe)))
        await until(lambda: playing.done() or bool(_in_a_later_answer(s)), seconds=SECONDS)
        for name in _in_a_later_answer(s)[:1]:
            await engines[name].die()
        status, result = await playing
        turns = (await s.get("/turns"))["recent"]
        sessions = {turn["session"] or turn["id"] for turn in turns}
        rows = [row for key in sessions for row in await rows_of(s, key)]
    assert status == 0, result
    assert (client.prints or client.last) in result, result
    assert sum(len(turn["moves"]) for turn in turns) >= 1, "an engine died in mid-answer"
    return Played(turns, rows)


@pytest.mark.parametrize("client", SDKS + AGENTS, ids=lambda client: client.name)
async def test_a_client_ends_its_task_and_every_token_of_its_rows_is_the_engines_own(
    stage: Staging, client: Client, tmp_path: Path
) -> None:
    other = Script("", ("A title of two words.",))
    recipe = scripted_recipe(f"client-{client.tool}", client.script(), other)
    watched = Watched(recipe)
    played = await play_while_an_engine_dies(client, recipe, watched, stage, tmp_path)
    text = Tokenizer(folder(recipe))
    longest = max(played.rows, key=lambda row: len(row["turns"]))
    assert len(longest["turns"]) == len(client.answers()), "one row"
    for row in played.rows:
        for turn in row["turns"]:
            assert turn["altered_at"] is None
            assert tuple(row["ids"][: turn["start"]]) in watched.prompts, "what the engine read"
    for turn, expected in zip(longest["turns"], client.answers(), strict=True):
        assert text.decode(longest["ids"][turn["start"] : turn["end"]]) == expected
    learnt = sum(sum(row["mask"]) for row in played.rows)
    assert learnt == sum(turn["tokens"] for turn in played.turns)


def _in_a_later_answer(stage: Stage) -> list[str]:
    """Engines that have given some tokens of an answer, one having been given before."""
    if not stage.router.service.ledger.totals.turns:
        return []
    return [
        turn.leg.engine
        for turn in stage.router.service.ledger
        if turn.leg is not None and turn.leg.placed >= 3
    ]


async def rows_of(stage: Stage, key: str) -> list[dict[str, Any]]:
    """Training rows of a session."""
    async with stage.http.get(f"{stage.url}/sessions/{key}/rows") as reply:
        found = await reply.json()
        return found["rows"] if reply.status == 200 else []


async def test_clients_know_a_prompt_beyond_the_context_as_such(
    stage: Staging, tmp_path: Path
) -> None:
    client = Client("too long", ("too_long.py",))
    if not installed(client):
        pytest.skip("the SDKs are not installed; make test-clients")
    async with stage(tokenizer=folder(), turn_token="good", context_tokens=1000) as s:
        await s.engine(script=Follows())
        status, printed = await play(client, s.router.http_port, tmp_path, folder())
    assert status == 0, printed
    assert [one for one in printed.splitlines() if one.startswith(_ASKING)] == [
        "litellm openai: ContextWindowExceededError None",
        "litellm anthropic: ContextWindowExceededError None",
        "langchain chat: OpenAIContextOverflowError context_length_exceeded",
        "langchain responses: OpenAIContextOverflowError context_length_exceeded",
        "langchain responses, streamed: OpenAIAPIContextOverflowError context_length_exceeded",
        "langchain messages: AnthropicContextOverflowError None",
        "openai chat: BadRequestError context_length_exceeded",
        "openai responses, streamed: APIError context_length_exceeded",
        "anthropic: BadRequestError None",
    ]


_ASKING = ("litellm ", "langchain ", "openai ", "anthropic:")


async def test_verifiers_train_client_gets_its_tokens_and_is_one_session(
    stage: Staging, tmp_path: Path
) -> None:
    """It sends token ids: what it trains on is its own, and the router keeps no rows."""
    client = Client("verifiers", ("verifiers_train.py",), environment="openai2")
    recipe = scripted_recipe("client-verifiers", Script("", client.answers()))
    played = await play_while_an_engine_dies(client, recipe, Follows(recipe), stage, tmp_path)
    assert {turn["session"] for turn in played.turns} == {"a-trace"}
    assert len(played.turns) == len(client.answers())
    assert played.rows == []


@dataclass(frozen=True)
class Game(Client):
    """A client that plays a game, whose model calls no tool."""

    moves: tuple[str, ...] = ()

    def answers(self) -> tuple[str, ...]:
        """The moves; the last one is made again and again."""
        return self.moves


async def test_verifiers_plays_and_scores_a_whole_environment_of_its_own(
    stage: Staging, tmp_path: Path
) -> None:
    """Tasks, game, harness and rewards are the package's; the model is behind the router."""
    letters = tuple(f"I try the letter [{one}] now." for one in "elpa")
    program = "verifiers_environment.py"
    client = Game(
        "verifiers environment",
        (program,),
        tool="",
        last="rewards 0.6 1.0",  # of grape three letters of five, of apple all
        environment="environments",
        moves=letters,
    )
    recipe = scripted_recipe("client-environment", client.script())
    watched = Watched(recipe)
    played = await play_while_an_engine_dies(client, recipe, watched, stage, tmp_path)
    assert len(played.turns) == 4 + 6, "apple was won, grape lost by a letter tried three times"
    for row in played.rows:
        for turn in row["turns"]:
            assert tuple(row["ids"][: turn["start"]]) in watched.prompts, "what the engine read"


@dataclass(frozen=True)
class Office(Client):
    """A client whose model finds an e-mail and answers it: two tools, by name."""

    def answers(self) -> tuple[str, ...]:
        """The first task of the environment, solved."""
        words = "Thanks for the update - I will get back to you tomorrow."
        return (
            "I look for it. " + call("email_search_emails", '{"query": "Task Update on Develop"}'),
            "<think>That is the one.</think>\nI answer. "
            + call("email_reply_email", f'{{"email_id": "00000057", "body": "{words}"}}'),
            self.last,
        )


async def test_nemo_gym_plays_and_scores_a_whole_environment_of_its_own(
    stage: Staging, tmp_path: Path
) -> None:
    """Servers, tasks, tools, agent and verifier are the package's, set as for training."""
    client = Office(
        "NeMo Gym environment",
        ("nemo_gym_environment.py",),
        tool="email_reply_email",
        last="It is answered.",
        environment="nemo-gym",
        prints="rewards 0.0 1.0",  # the second task is another one, and the same is done for it
    )
    recipe = scripted_recipe("client-office", client.script())
    watched = Watched(recipe)
    played = await play_while_an_engine_dies(client, recipe, watched, stage, tmp_path)
    assert len(played.turns) == 2 * 3
    for row in played.rows:
        for turn in row["turns"]:
            assert tuple(row["ids"][: turn["start"]]) in watched.prompts, "what the engine read"
    text = Tokenizer(folder(recipe))
    for line in (tmp_path / "rollouts.jsonl").read_text().splitlines():
        answers = [
            one for one in json.loads(line)["response"]["output"] if "generation_token_ids" in one
        ]
        output = [
            text.decode([int(one) for one in answer["generation_token_ids"]]) for answer in answers
        ]
        assert output == list(client.answers())
        for answer in answers:
            assert tuple(answer["prompt_token_ids"]) in watched.prompts, "what it trains on"
            assert len(answer["generation_log_probs"]) == len(answer["generation_token_ids"])


async def test_openenv_plays_and_scores_two_environments_of_its_own(
    stage: Staging, tmp_path: Path
) -> None:
    """Servers, clients, harness, rewards and capture are packages', set as for training."""
    client = Client(
        "OpenEnv environments",
        ("openenv_environments.py",),
        tool="say",
        calls=tuple(f'{{"message": "{one}"}}' for one in ("hello", "hello again", "adieu")),
        last="All is said.",
        environment="openenv",
        # Of the last message; of an abstention where it is wrong, and where it is right.
        prints="rewards 0.5 -5.0 30.0",
    )
    abstains = "<analysis>I look.</analysis><answer>It is not mentioned.</answer>"
    safe = Script("answer", ("So: " + call("answer", json.dumps({"llm_response": abstains})),))
    tried = Script("", ("Ok.",))  # too short for an engine to die in it
    recipe = scripted_recipe("client-openenv", client.script(), safe, tried)
    watched = Watched(recipe)
    played = await play_while_an_engine_dies(client, recipe, watched, stage, tmp_path)
    assert max(len(row["turns"]) for row in played.rows) == len(client.answers())
    for row in played.rows:
        for turn in row["turns"]:
            assert tuple(row["ids"][: turn["start"]]) in watched.prompts, "what the engine read"
    text = Tokenizer(folder(recipe))
    turns = json.loads((tmp_path / "turns.json").read_text())
    output = [text.decode(turn["completion_token_ids"]) for turn in turns]
    assert output == [*client.answers(), *safe.answers * 2]
    for turn in turns:
        ids, prompt = turn["completion_token_ids"], turn["prompt_token_ids"]
        assert tuple(prompt) in watched.prompts, "what it trains on"
        assert len(turn["per_token_logps"]) == len(ids)
        assert turn["loss_mask"] == [0] * len(prompt) + [1] * len(ids)
