"""Tasks as agents have them, with the turns of one who solves them and a check of the outcome.

Everything comes from the image ``base`` (Debian); nothing is fetched. What makes them hard to give
back after a loss stands in ``holds``: files alone are in all of them, the rest is what a copy of
the files forgets. A task's turns leave it in the same state whenever they are played.
Next step: the benchmark plays them one turn at a time and kills in between.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: of the task.
        holds: what of its state is more than files: ``shell``, ``job``, ``server``, ``deleted``,
            ``socket``, ``terminal``, ``memory``; empty: files only.
        turns: commands, one a turn.
        verify: exits 0 where the outcome is right.
        session: the shell that the turns share; None: a fresh one for each.
    """

    name: str
    holds: tuple[str, ...]
    turns: tuple[str, ...]
    verify: str
    session: str | None = "main"


_COUNTER = """cat > /home/counter.py <<'END'
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        self.reply()
    def do_POST(self):
        Handler.count += 1
        self.reply()
    def reply(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(Handler.count).encode())
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
END"""
_UP = "for i in $(seq 50); do curl -sf localhost:8000 >/dev/null && break; sleep 0.1; done"
_POST = "curl -s -X POST localhost:8000"
_COMMITS = (
    "git config --global user.email a@b.c; git config --global user.name a; "
    "git init -q -b main /home/r; cd /home/r; for i in 1 2 3; do echo $i >> f; "
    "git add f; git commit -qm $i; done"
)

TASKS = (
    # --- a shell that remembers
    Task(
        "working-folder",
        ("shell",),
        ("mkdir -p /home/a/b; cd /home/a/b", "ls /", "pwd", "echo here > mark"),
        "test $(cat /home/a/b/mark) = here",
    ),
    Task(
        "exported-variables",
        ("shell",),
        ("export STAGE=prod", "export LEVEL=3", "env | grep STAGE", "echo $STAGE-$LEVEL > /home/v"),
        "test $(cat /home/v) = prod-3",
    ),
    Task(
        "shell-functions",
        ("shell",),
        (
            "twice() { echo $(( $1 * 2 )); }",
            "ls /home",
            "quad() { twice $(twice $1); }",
            "uptime",
            "quad 5 > /home/q",
        ),
        "test $(cat /home/q) = 20",
    ),
    Task(
        "arrays-and-options",
        ("shell",),
        ("shopt -s extglob; list=(a b c)", "list+=(d)", "ls /usr", "echo ${#list[@]} > /home/n"),
        "test $(cat /home/n) = 4",
    ),
    Task(
        "activated-venv",
        ("shell",),
        (
            "python3 -m venv --without-pip /home/venv",
            ". /home/venv/bin/activate",
            "python -c 'import sys; print(sys.prefix)'",
            "python -c 'import sys; print(sys.prefix)' > /home/prefix",
        ),
        "test $(cat /home/prefix) = /home/venv",
    ),
    Task(
        "umask-and-limits",
        ("shell",),
        (
            "umask 077",
            "ulimit -n 200",
            "cat /proc/self/limits",
            "ulimit -n > /home/l; touch /home/u",
        ),
        "test $(cat /home/l) = 200 && test $(stat -c %a /home/u) = 600",
    ),
    # --- descriptors
    Task(
        "open-descriptor",
        ("shell",),
        ("exec 5>>/home/log", "echo one >&5", "cat /home/log", "echo two >&5", "exec 5>&-"),
        'test "$(paste -sd, /home/log)" = one,two',
    ),
    Task(
        "read-half-a-file",
        ("shell",),
        (
            "seq 10 > /home/in; exec 6</home/in",
            "read a <&6; read b <&6",
            "ls",
            "read c <&6; echo $a$b$c > /home/o",
        ),
        "test $(cat /home/o) = 123",
    ),
    Task(
        "deleted-open-file",
        ("shell", "deleted"),
        (
            "exec 7<>/home/secret; echo hidden >&7",
            "rm /home/secret",
            "ls -la /home",
            "cat /proc/$$/fd/7 > /home/found",
        ),
        "test $(cat /home/found) = hidden && ! test -e /home/secret",
    ),
    Task(
        "deleted-log-of-a-job",
        ("job", "deleted"),
        (
            'python3 -uc \'import time\nf=open("/home/d","w+");f.write("kept");f.flush()\n'
            "time.sleep(9000)' &",
            "sleep 0.5; rm /home/d",
            "ps aux | wc -l",
            "cat /proc/$(pgrep -f time.sleep | head -1)/fd/3 > /home/got",
        ),
        "test $(cat /home/got) = kept",
        session=None,
    ),
    Task(
        "pipe-between-jobs",
        ("job",),
        (
            "mkfifo /home/p; (while read -r x; do echo got $x >> /home/got; done) <>/home/p &",
            "echo a > /home/p; sleep 0.2",
            "cat /home/got",
            "echo b > /home/p; sleep 0.2",
        ),
        "test \"$(paste -sd, /home/got)\" = 'got a,got b'",
        session=None,
    ),
    # --- jobs
    Task(
        "background-sleep",
        ("job",),
        ("sleep 9000 & echo $! > /home/pid", "ps aux", "ls /", "uptime"),
        "test $(cat /proc/$(cat /home/pid)/comm) = sleep",
        session=None,
    ),
    Task(
        "job-of-a-shell",
        ("shell", "job"),
        ("sleep 9000 & job=$!", "ls", "kill -0 $job", "kill $job; wait $job; echo $? > /home/rc"),
        "test $(cat /home/rc) = 143",
    ),
    Task(
        "stopped-process",
        ("job",),
        (
            "sleep 9000 & echo $! > /home/pid",
            "kill -STOP $(cat /home/pid)",
            "ps aux",
            "cut -d' ' -f3 /proc/$(cat /home/pid)/stat > /home/state",
        ),
        "test $(cat /home/state) = T",
        session=None,
    ),
    Task(
        "handler-of-a-signal",
        ("job", "memory"),
        (
            "python3 -c 'import signal,time\nn=[0]\ndef h(*a):\n n[0]+=1\n"
            ' open("/home/n","w").write(str(n[0]))\n'
            "signal.signal(signal.SIGUSR1,h)\nwhile True: time.sleep(9000)' & "
            "echo $! > /home/pid; sleep 0.5",
            "kill -USR1 $(cat /home/pid); sleep 0.2",
            "cat /home/n",
            "kill -USR1 $(cat /home/pid); sleep 0.2",
        ),
        "test $(cat /home/n) = 2",
        session=None,
    ),
    # --- servers
    Task(
        "counting-server",
        ("server", "memory"),
        (_COUNTER, f"python3 /home/counter.py & {_UP}", _POST, "ls /home", _POST, _POST),
        "test $(curl -s localhost:8000) = 3",
        session=None,
    ),
    Task(
        "file-server",
        ("server",),
        (
            "mkdir /home/www; echo hello > /home/www/x",
            f"cd /home/www; python3 -m http.server 8000 >/dev/null 2>&1 & {_UP}",
            "curl -s localhost:8000/x",
            "echo again > /home/www/y",
        ),
        "test $(curl -s localhost:8000/y) = again",
        session=None,
    ),
    Task(
        "redis-in-memory",
        ("server", "memory"),
        (
            "redis-server --save '' --port 6379 --daemonize yes >/dev/null; sleep 0.5",
            "redis-cli set a 1",
            "redis-cli incr a; redis-cli incr a",
            "redis-cli get a",
            "redis-cli rpush l x y z",
        ),
        "test $(redis-cli get a) = 3 && test $(redis-cli llen l) = 3",
        session=None,
    ),
    Task(
        "unix-socket-echo",
        ("server", "socket"),
        (
            "socat UNIX-LISTEN:/home/s,fork EXEC:cat & sleep 0.5",
            "echo one | socat - UNIX-CONNECT:/home/s",
            "ls -la /home",
            "echo two | socat - UNIX-CONNECT:/home/s > /home/e",
        ),
        "test $(cat /home/e) = two",
        session=None,
    ),
    Task(
        "tcp-connection-left-open",
        ("shell", "server", "socket"),
        (
            "socat TCP-LISTEN:9000,reuseaddr,fork EXEC:cat & sleep 0.5",
            "exec 8<>/dev/tcp/127.0.0.1/9000",
            "echo one >&8; read -r x <&8",
            "ls /",
            "echo two >&8; read -r y <&8; echo $x$y > /home/xy",
        ),
        "test $(cat /home/xy) = onetwo",
    ),
    Task(
        "udp-listener",
        ("server", "socket"),
        (
            "socat -u UDP-RECV:9001 OPEN:/home/u,creat,append & sleep 0.5",
            "echo a | socat - UDP:127.0.0.1:9001; sleep 0.2",
            "cat /home/u",
            "echo b | socat - UDP:127.0.0.1:9001; sleep 0.2",
        ),
        'test "$(paste -sd, /home/u)" = a,b',
        session=None,
    ),
    Task(
        "job-queue",
        ("job", "memory"),
        (
            "mkdir /home/q /home/done; cat > /home/w.py <<'END'\n"
            "import os,time\nseen=[]\nwhile True:\n"
            " for n in sorted(set(os.listdir('/home/q'))-set(seen)):\n"
            "  seen.append(n); open('/home/done/'+n,'w').write(str(len(seen)))\n"
            " time.sleep(0.05)\nEND",
            "python3 /home/w.py &",
            "touch /home/q/a; sleep 0.4",
            "ls /home/done",
            "touch /home/q/b; sleep 0.4",
        ),
        "test $(cat /home/done/a)$(cat /home/done/b) = 12",
        session=None,
    ),
    # --- terminals
    Task(
        "tmux-shell",
        ("terminal", "memory"),
        (
            "tmux new-session -d -s w; sleep 0.3",
            "tmux send-keys -t w 'X=42' Enter; sleep 0.3",
            "tmux ls",
            "tmux send-keys -t w 'echo $X > /home/x' Enter; sleep 0.5",
        ),
        "test $(cat /home/x) = 42",
        session=None,
    ),
    Task(
        "python-prompt",
        ("terminal", "memory"),
        (
            "tmux new-session -d -s p 'python3 -q'; sleep 0.8",
            "tmux send-keys -t p 'n = 6' Enter; sleep 0.3",
            "tmux capture-pane -pt p",
            'tmux send-keys -t p \'open("/home/o", "w").write(str(n * 7))\' Enter; sleep 0.5',
        ),
        "test $(cat /home/o) = 42",
        session=None,
    ),
    # --- data bases
    Task(
        "sqlite-rows",
        (),
        (
            "sqlite3 /home/d 'create table t(a int); insert into t values (1),(2)'",
            "sqlite3 /home/d 'select count(*) from t'",
            "sqlite3 /home/d 'insert into t select a+10 from t'",
            "sqlite3 /home/d '.schema'",
        ),
        "test $(sqlite3 /home/d 'select sum(a) from t') = 26",
    ),
    Task(
        "sqlite-open-transaction",
        ("job", "memory"),
        (
            "sqlite3 /home/d 'create table t(a int)'; mkfifo /home/sql; "
            "sleep 9000 > /home/sql & sqlite3 /home/d < /home/sql > /home/out &",
            "echo 'begin; insert into t values (1);' > /home/sql; sleep 0.2",
            "sqlite3 /home/d 'select count(*) from t' > /home/before",
            "echo 'insert into t values (2); commit;' > /home/sql; sleep 0.4",
        ),
        "test $(cat /home/before) = 0 && test $(sqlite3 /home/d 'select sum(a) from t') = 3",
        session=None,
    ),
    # --- builds and repositories
    Task(
        "git-history",
        (),
        (
            _COMMITS,
            "git -C /home/r log --oneline",
            "git -C /home/r status",
            "git -C /home/r tag v1",
        ),
        "test $(git -C /home/r rev-list --count v1) = 3",
    ),
    Task(
        "git-rebase-in-the-middle",
        (),
        (
            _COMMITS,
            "cd /home/r; git checkout -q -b side HEAD~1; echo side > f; git commit -qam side",
            "git rebase main",
            "git status; git diff",
            "echo solved > f; git add f",
            "GIT_EDITOR=true git rebase --continue",
        ),
        "cd /home/r && test $(cat f) = solved && test $(git rev-list --count HEAD) = 4",
    ),
    Task(
        "git-stash-and-bisect",
        (),
        (
            _COMMITS,
            "cd /home/r; echo dirty >> f; git stash -q",
            "git bisect start -q HEAD HEAD~2",
            "git bisect good",
            "git bisect reset -q; git stash pop -q",
        ),
        "cd /home/r && test $(tail -1 f) = dirty && test $(git branch --show-current) = main",
    ),
    Task(
        "half-done-make",
        (),
        (
            "mkdir /home/m; cd /home/m; "
            "printf 'all: a b c\\na b c:\\n\\techo $@ > $@\\n' > Makefile",
            "make a",
            "make -n",
            "make b",
            "make",
        ),
        "cd /home/m && make -q && test $(cat a b c | paste -sd '') = abc",
    ),
    Task(
        "make-in-the-background",
        ("job",),
        (
            "mkdir /home/m; cd /home/m; printf "
            "'all: a b\\na:\\n\\tsleep 3; echo a > a\\nb: a\\n\\techo b > b\\n' > Makefile",
            "make > log 2>&1 & echo $! > pid",
            "ls",
            "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.1; done",
        ),
        "cd /home/m && test $(cat a)$(cat b) = ab",
    ),
    Task(
        "compiled-program",
        (),
        (
            "printf '#include <stdio.h>\\nint main(){puts(\"built\");}\\n' > /home/h.c",
            "gcc -c /home/h.c -o /home/h.o",
            "file /home/h.o",
            "gcc /home/h.o -o /home/h",
        ),
        "test $(/home/h) = built",
    ),
    Task(
        "patched-source",
        (),
        (
            "mkdir /home/s; cd /home/s; seq 5 > f; cp f g; sed -i 3d g; diff -u f g > p; rm g",
            "patch --dry-run f p",
            "patch f p",
            "cat f",
        ),
        "test $(paste -sd '' /home/s/f) = 1245",
    ),
    # --- files of other kinds
    Task(
        "links-modes-and-holes",
        (),
        (
            "cd /home; echo x > a; ln a b; ln -s a c; chmod 4711 a",
            "truncate -s 10M hole; mkfifo p",
            "stat a",
            "chown 1000:1000 b; touch -d 2001-01-01 hole",
        ),
        "cd /home && test $(stat -c %h%a%u a) = 247111000 -o $(stat -c %h%u a) = 21000 "
        "&& test $(stat -c %Y hole) = $(date -d 2001-01-01 +%s) && test -p p && test $(cat c) = x",
    ),
    Task(
        "image-files-replaced",
        (),
        (
            "rm -r /usr/share/doc; mkdir /usr/share/doc; echo mine > /usr/share/doc/x",
            "ls /usr/share/doc",
            "rm /etc/hostname; mv /etc/services /etc/services.old",
            "ls /etc | wc -l",
        ),
        "test $(ls /usr/share/doc) = x && ! test -e /etc/hostname && ! test -e /etc/services "
        "&& test -s /etc/services.old",
    ),
    Task(
        "archive-and-restore",
        (),
        (
            "mkdir -p /home/t/d; seq 100 > /home/t/d/n; cd /home; zip -qr t.zip t",
            "unzip -l t.zip",
            "rm -r t",
            "unzip -q t.zip; rsync -a t/ u/",
        ),
        "diff -r /home/t /home/u && test $(wc -l < /home/u/d/n) = 100",
    ),
    Task(
        "memory-file-system",
        ("memory",),
        (
            "echo cached > /dev/shm/c",
            "df /dev/shm",
            "cat /dev/shm/c",
            "echo more >> /dev/shm/c",
        ),
        'test "$(paste -sd, /dev/shm/c)" = cached,more',
        session=None,
    ),
)
