"""Turns in the shares of recorded agents', with what each one's command leaves behind.

The shares are of 3,374 commands in 171 runs of Terminal-Bench by a public agent (mini-swe-agent,
August 2025; logs in laude-institute/terminal-bench-leaderboard), sorted by their shape; no text of
theirs is here. Whether a script that is run changes something cannot be seen from its name: here
half do.
Next step: ``waits`` plays them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PROJECT = """mkdir -p /home/p && cd /home/p && git init -q -b main . && git config user.email a@b.c
git config user.name a
for n in 1 2 3 4 5 6; do printf 'def f%s(x):\\n    return x + %s\\n' $n $n > m$n.py; done
printf 'import sys\\nprint(sum(range(int(sys.argv[1]))))\\n' > app.py
printf 'd=$(mktemp); grep -c def m*.py > $d; cat $d; rm $d\\n' > check.sh
printf 'open("out.txt", "a").write("x")\\n' > build.py
printf 'int main(void) { return 0; }\\n' > a.c
git add . && git commit -qm begun"""


@dataclass(frozen=True)
class Turn:
    """One command.

    Attributes:
        command: for the session's shell.
        kind: a key of ``SHARES``.
        changes: whether it leaves anything behind.
    """

    command: str
    kind: str
    changes: bool


SHARES = {
    "write a file": 947,
    "read": 906,
    "run a script": 576,
    "install": 309,
    "inline code": 210,
    "other programs": 156,
    "the last word": 163,
    "background": 107,
}
"""Commands of each shape in the logs."""

# Commands of each shape that change nothing, and those that do; NUMBER is the turn's.
_COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "write a file": (
        (),
        (
            "echo 'x = NUMBER' >> m1.py",
            "sed -i 's/return x/return NUMBER + x/' m3.py",
            "cat > made-NUMBER.py <<'END'\nprint(NUMBER)\nEND",
        ),
    ),
    "read": (
        (
            *("ls -la", "cat app.py m1.py", "grep -rn def .", "find / -maxdepth 3 -name '*.conf'"),
            *("pwd", "head -3 m*.py", "wc -l *.py", "git log --oneline", "git diff HEAD", "ps aux"),
            *("which gcc", "sed -n 1,2p m2.py", "stat app.py", "du -sh .", "diff m1.py m2.py"),
        ),
        (),
    ),
    "run a script": (
        ("python3 app.py 9", "bash check.sh"),
        ("python3 build.py", "echo 'int b;' >> a.c; gcc -c a.c -o a.o"),
    ),
    "install": ((), ("mkdir siteNUMBER && cp -r /usr/lib/python3/dist-packages siteNUMBER",)),
    "inline code": (
        (
            "python3 -c 'import json; print(json.dumps({1: 2}))'",
            "python3 -c 'print(open(\"app.py\").read().count(chr(10)))'",
            "python3 --version",
        ),
        (),
    ),
    "other programs": (
        ("curl -s localhost:1", "gcc -fsyntax-only a.c", "sqlite3 :memory: 'select 1'"),
        (),
    ),
    "the last word": (("echo done",), ()),
    "background": (
        (),
        (
            "sleep 900NUMBER &",
            "python3 -m http.server 800NUMBER > servedNUMBER 2>&1 &",
        ),
    ),
}


def draw(dice: random.Random, number: int) -> Turn:
    """A turn by the shares; ``number`` makes what it writes its own."""
    (kind,) = dice.choices(list(SHARES), list(SHARES.values()))
    idle, acting = _COMMANDS[kind]
    changes = not idle or (bool(acting) and dice.random() < 0.5)
    command = dice.choice(acting if changes else idle)
    return Turn(command.replace("NUMBER", str(number)), kind, changes)
