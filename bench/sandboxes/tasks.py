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


_COUNTER = """cat > /root/counter.py <<'END'
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
    "git init -q -b main /root/r; cd /root/r; for i in 1 2 3; do echo $i >> f; "
    "git add f; git commit -qm $i; done"
)

TASKS = (
    # --- a shell that remembers
    Task(
        "working-folder",
        ("shell",),
        ("mkdir -p /root/a/b; cd /root/a/b", "ls /", "pwd", "echo here > mark"),
        "test $(cat /root/a/b/mark) = here",
    ),
    Task(
        "exported-variables",
        ("shell",),
        ("export STAGE=prod", "export LEVEL=3", "env | grep STAGE", "echo $STAGE-$LEVEL > /root/v"),
        "test $(cat /root/v) = prod-3",
    ),
    Task(
        "shell-functions",
        ("shell",),
        (
            "twice() { echo $(( $1 * 2 )); }",
            "ls /root",
            "quad() { twice $(twice $1); }",
            "uptime",
            "quad 5 > /root/q",
        ),
        "test $(cat /root/q) = 20",
    ),
    Task(
        "arrays-and-options",
        ("shell",),
        ("shopt -s extglob; list=(a b c)", "list+=(d)", "ls /usr", "echo ${#list[@]} > /root/n"),
        "test $(cat /root/n) = 4",
    ),
    Task(
        "activated-venv",
        ("shell",),
        (
            "python3 -m venv --without-pip /root/venv",
            ". /root/venv/bin/activate",
            "python -c 'import sys; print(sys.prefix)'",
            "python -c 'import sys; print(sys.prefix)' > /root/prefix",
        ),
        "test $(cat /root/prefix) = /root/venv",
    ),
    Task(
        "umask-and-limits",
        ("shell",),
        (
            "umask 077",
            "ulimit -n 200",
            "cat /proc/self/limits",
            "ulimit -n > /root/l; touch /root/u",
        ),
        "test $(cat /root/l) = 200 && test $(stat -c %a /root/u) = 600",
    ),
    # --- descriptors
    Task(
        "open-descriptor",
        ("shell",),
        ("exec 5>>/root/log", "echo one >&5", "cat /root/log", "echo two >&5", "exec 5>&-"),
        'test "$(paste -sd, /root/log)" = one,two',
    ),
    Task(
        "read-half-a-file",
        ("shell",),
        (
            "seq 10 > /root/in; exec 6</root/in",
            "read a <&6; read b <&6",
            "ls",
            "read c <&6; echo $a$b$c > /root/o",
        ),
        "test $(cat /root/o) = 123",
    ),
    Task(
        "deleted-open-file",
        ("shell", "deleted"),
        (
            "exec 7<>/root/secret; echo hidden >&7",
            "rm /root/secret",
            "ls -la /root",
            "cat /proc/$$/fd/7 > /root/found",
        ),
        "test $(cat /root/found) = hidden && ! test -e /root/secret",
    ),
    Task(
        "deleted-log-of-a-job",
        ("job", "deleted"),
        (
            'python3 -uc \'import time\nf=open("/root/d","w+");f.write("kept");f.flush()\n'
            "time.sleep(9000)' &",
            "sleep 0.5; rm /root/d",
            "ps aux | wc -l",
            "cat /proc/$(pgrep -f time.sleep | head -1)/fd/3 > /root/got",
        ),
        "test $(cat /root/got) = kept",
        session=None,
    ),
    Task(
        "pipe-between-jobs",
        ("job",),
        (
            "mkfifo /root/p; (while read -r x; do echo got $x >> /root/got; done) <>/root/p &",
            "echo a > /root/p; sleep 0.2",
            "cat /root/got",
            "echo b > /root/p; sleep 0.2",
        ),
        "test \"$(paste -sd, /root/got)\" = 'got a,got b'",
        session=None,
    ),
    # --- jobs
    Task(
        "background-sleep",
        ("job",),
        ("sleep 9000 & echo $! > /root/pid", "ps aux", "ls /", "uptime"),
        "test $(cat /proc/$(cat /root/pid)/comm) = sleep",
        session=None,
    ),
    Task(
        "job-of-a-shell",
        ("shell", "job"),
        ("sleep 9000 & job=$!", "ls", "kill -0 $job", "kill $job; wait $job; echo $? > /root/rc"),
        "test $(cat /root/rc) = 143",
    ),
    Task(
        "stopped-process",
        ("job",),
        (
            "sleep 9000 & echo $! > /root/pid",
            "kill -STOP $(cat /root/pid)",
            "ps aux",
            "cut -d' ' -f3 /proc/$(cat /root/pid)/stat > /root/state",
        ),
        "test $(cat /root/state) = T",
        session=None,
    ),
    Task(
        "handler-of-a-signal",
        ("job", "memory"),
        (
            "python3 -c 'import signal,time\nn=[0]\ndef h(*a):\n n[0]+=1\n"
            ' open("/root/n","w").write(str(n[0]))\n'
            "signal.signal(signal.SIGUSR1,h)\nwhile True: time.sleep(9000)' & "
            "echo $! > /root/pid; sleep 0.5",
            "kill -USR1 $(cat /root/pid); sleep 0.2",
            "cat /root/n",
            "kill -USR1 $(cat /root/pid); sleep 0.2",
        ),
        "test $(cat /root/n) = 2",
        session=None,
    ),
    # --- servers
    Task(
        "counting-server",
        ("server", "memory"),
        (_COUNTER, f"python3 /root/counter.py & {_UP}", _POST, "ls /root", _POST, _POST),
        "test $(curl -s localhost:8000) = 3",
        session=None,
    ),
    Task(
        "file-server",
        ("server",),
        (
            "mkdir /root/www; echo hello > /root/www/x",
            f"cd /root/www; python3 -m http.server 8000 >/dev/null 2>&1 & {_UP}",
            "curl -s localhost:8000/x",
            "echo again > /root/www/y",
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
            "socat UNIX-LISTEN:/root/s,fork EXEC:cat & sleep 0.5",
            "echo one | socat - UNIX-CONNECT:/root/s",
            "ls -la /root",
            "echo two | socat - UNIX-CONNECT:/root/s > /root/e",
        ),
        "test $(cat /root/e) = two",
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
            "echo two >&8; read -r y <&8; echo $x$y > /root/xy",
        ),
        "test $(cat /root/xy) = onetwo",
    ),
    Task(
        "udp-listener",
        ("server", "socket"),
        (
            "socat -u UDP-RECV:9001 OPEN:/root/u,creat,append & sleep 0.5",
            "echo a | socat - UDP:127.0.0.1:9001; sleep 0.2",
            "cat /root/u",
            "echo b | socat - UDP:127.0.0.1:9001; sleep 0.2",
        ),
        'test "$(paste -sd, /root/u)" = a,b',
        session=None,
    ),
    Task(
        "job-queue",
        ("job", "memory"),
        (
            "mkdir /root/q /root/done; cat > /root/w.py <<'END'\n"
            "import os,time\nseen=[]\nwhile True:\n"
            " for n in sorted(set(os.listdir('/root/q'))-set(seen)):\n"
            "  seen.append(n); open('/root/done/'+n,'w').write(str(len(seen)))\n"
            " time.sleep(0.05)\nEND",
            "python3 /root/w.py &",
            "touch /root/q/a; sleep 0.4",
            "ls /root/done",
            "touch /root/q/b; sleep 0.4",
        ),
        "test $(cat /root/done/a)$(cat /root/done/b) = 12",
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
            "tmux send-keys -t w 'echo $X > /root/x' Enter; sleep 0.5",
        ),
        "test $(cat /root/x) = 42",
        session=None,
    ),
    Task(
        "python-prompt",
        ("terminal", "memory"),
        (
            "tmux new-session -d -s p 'python3 -q'; sleep 0.8",
            "tmux send-keys -t p 'n = 6' Enter; sleep 0.3",
            "tmux capture-pane -pt p",
            'tmux send-keys -t p \'open("/root/o", "w").write(str(n * 7))\' Enter; sleep 0.5',
        ),
        "test $(cat /root/o) = 42",
        session=None,
    ),
    # --- data bases
    Task(
        "sqlite-rows",
        (),
        (
            "sqlite3 /root/d 'create table t(a int); insert into t values (1),(2)'",
            "sqlite3 /root/d 'select count(*) from t'",
            "sqlite3 /root/d 'insert into t select a+10 from t'",
            "sqlite3 /root/d '.schema'",
        ),
        "test $(sqlite3 /root/d 'select sum(a) from t') = 26",
    ),
    Task(
        "sqlite-open-transaction",
        ("job", "memory"),
        (
            "sqlite3 /root/d 'create table t(a int)'; mkfifo /root/sql; "
            "sleep 9000 > /root/sql & sqlite3 /root/d < /root/sql > /root/out &",
            "echo 'begin; insert into t values (1);' > /root/sql; sleep 0.2",
            "sqlite3 /root/d 'select count(*) from t' > /root/before",
            "echo 'insert into t values (2); commit;' > /root/sql; sleep 0.4",
        ),
        "test $(cat /root/before) = 0 && test $(sqlite3 /root/d 'select sum(a) from t') = 3",
        session=None,
    ),
    # --- builds and repositories
    Task(
        "git-history",
        (),
        (
            _COMMITS,
            "git -C /root/r log --oneline",
            "git -C /root/r status",
            "git -C /root/r tag v1",
        ),
        "test $(git -C /root/r rev-list --count v1) = 3",
    ),
    Task(
        "git-rebase-in-the-middle",
        (),
        (
            _COMMITS,
            "cd /root/r; git checkout -q -b side HEAD~1; echo side > f; git commit -qam side",
            "git rebase main",
            "git status; git diff",
            "echo solved > f; git add f",
            "GIT_EDITOR=true git rebase --continue",
        ),
        "cd /root/r && test $(cat f) = solved && test $(git rev-list --count HEAD) = 4",
    ),
    Task(
        "git-stash-and-bisect",
        (),
        (
            _COMMITS,
            "cd /root/r; echo dirty >> f; git stash -q",
            "git bisect start -q HEAD HEAD~2",
            "git bisect good",
            "git bisect reset -q; git stash pop -q",
        ),
        "cd /root/r && test $(tail -1 f) = dirty && test $(git branch --show-current) = main",
    ),
    Task(
        "half-done-make",
        (),
        (
            "mkdir /root/m; cd /root/m; "
            "printf 'all: a b c\\na b c:\\n\\techo $@ > $@\\n' > Makefile",
            "make a",
            "make -n",
            "make b",
            "make",
        ),
        "cd /root/m && make -q && test $(cat a b c | paste -sd '') = abc",
    ),
    Task(
        "make-in-the-background",
        ("job",),
        (
            "mkdir /root/m; cd /root/m; printf "
            "'all: a b\\na:\\n\\tsleep 3; echo a > a\\nb: a\\n\\techo b > b\\n' > Makefile",
            "make > log 2>&1 & echo $! > pid",
            "ls",
            "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.1; done",
        ),
        "cd /root/m && test $(cat a)$(cat b) = ab",
    ),
    Task(
        "compiled-program",
        (),
        (
            "printf '#include <stdio.h>\\nint main(){puts(\"built\");}\\n' > /root/h.c",
            "gcc -c /root/h.c -o /root/h.o",
            "file /root/h.o",
            "gcc /root/h.o -o /root/h",
        ),
        "test $(/root/h) = built",
    ),
    Task(
        "patched-source",
        (),
        (
            "mkdir /root/s; cd /root/s; seq 5 > f; cp f g; sed -i 3d g; diff -u f g > p; rm g",
            "patch --dry-run f p",
            "patch f p",
            "cat f",
        ),
        "test $(paste -sd '' /root/s/f) = 1245",
    ),
    # --- files of other kinds
    Task(
        "links-modes-and-holes",
        (),
        (
            "cd /root; echo x > a; ln a b; ln -s a c; chmod 4711 a",
            "truncate -s 10M hole; mkfifo p",
            "stat a",
            "chown 1000:1000 b; touch -d 2001-01-01 hole",
        ),
        "cd /root && test $(stat -c %h%a%u a) = 247111000 -o $(stat -c %h%u a) = 21000 "
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
            "mkdir -p /root/t/d; seq 100 > /root/t/d/n; cd /root; zip -qr t.zip t",
            "unzip -l t.zip",
            "rm -r t",
            "unzip -q t.zip; rsync -a t/ u/",
        ),
        "diff -r /root/t /root/u && test $(wc -l < /root/u/d/n) = 100",
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
