"""``vf-eval`` plays verifiers' TextArena environment: its tasks, game, harness and rewards.

The environment would fetch a list of words; here it finds one of two words, made on the spot. Its
harness is a script that uv gives its packages: they lie as wheels beside this environment.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

EVAL = """
model = "policy"
push = false
[client]
type = "eval"
base_url = "{url}/v1"
api_key_var = "ROSE_KEY"
[select]
limit = 2
[env.taskset]
id = "textarena"
game = "Hangman-v0"
[env.player.harness]
id = "null"
[env.player.runtime]
type = "subprocess"
"""
beside = Path(sys.prefix)
words = Path("nltk_data/corpora/words")
words.mkdir(parents=True)
for name in ("en", "en-basic", "README"):
    (words / name).write_text("apple\ngrape\n")
Path("eval.toml").write_text(EVAL.format(url=os.environ["ROSE_URL"]))
environment = os.environ | {
    "NLTK_DATA": str(words.parent.parent.resolve()),
    "PATH": f"{beside / 'bin'}{os.pathsep}{os.environ['PATH']}",
    "UV_FIND_LINKS": str(beside / "wheels"),
    "UV_DEFAULT_INDEX": str(beside / "wheels"),
    "UV_PYTHON": sys.executable,
}
subprocess.run(["vf-eval", "@", "eval.toml", "--no-rich"], env=environment, check=True)
(found,) = Path("outputs").glob("*/**/traces.jsonl")
episodes = [json.loads(line) for line in found.read_text().splitlines()]
traces = [trace for episode in episodes for trace in episode["traces"]]
assert not any(trace["errors"] for trace in traces), json.dumps([t["errors"] for t in traces])
print("rewards", *sorted(trace["rewards"]["game_reward"]["score"] for trace in traces))
