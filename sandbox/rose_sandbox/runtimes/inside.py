"""The first process of a sandbox, and how the host talks with it.

Its ``/run/rose``, in memory, holds everything about a command under way. So a disk that is full or
a checkpoint loses none of it, and a command's streams are files of the sandbox: they have no end on
the host, which nothing could give back.

| file | written by | holds |
|---|---|---|
| ``in`` | host | a line per command: its number, and its session or ``-`` |
| ``N.cmd`` | host | the command |
| ``N.pid`` | runner | process id of what runs it, in the sandbox |
| ``N.out``, ``N.err`` | command | its streams |
| ``N.rc`` | runner | a line: exit code, then ``lost`` where the session's shell has ended |
| ``w.NAME`` | session's shell | all that it knows, after each command: the inspector reads it |
| ``s.NAME`` | host, through the first process | lines for a session's shell: numbers |

Next step: ``runc`` writes and reads them.
"""

from __future__ import annotations

FOLDER = "/run/rose"

# A fresh shell for one command. Its own session, so that all it starts can be found.
ONE = r"""
n=$1; cd "$2" 2>/dev/null
echo $$ >/run/rose/$n.pid
bash /run/rose/$n.cmd </dev/null >/run/rose/$n.out 2>/run/rose/$n.err
echo $? >/run/rose/$n.rc
"""

# A shell that lives on. Names that begin with _rose are its own.
SESSION = r"""
_rose_name=$1; cd "$2" 2>/dev/null; set --
_rose_say() { builtin echo "$1" >/run/rose/$_rose_n.rc; }
while read -r _rose_n <&9; do
  echo $$ >/run/rose/$_rose_n.pid
  trap '_rose_say "$? lost"' EXIT
  eval "$(</run/rose/$_rose_n.cmd)" \
    </dev/null >/run/rose/$_rose_n.out 2>/run/rose/$_rose_n.err 9>&-
  _rose_code=$?
  trap - EXIT
  {
    builtin declare -p; builtin declare -fp; builtin alias -p; builtin shopt -p; builtin set +o
    builtin trap -p; builtin dirs -l; builtin enable -n; builtin printf '%q ' "$!" "$@"
  } >/run/rose/w.$_rose_name 2>/dev/null
  _rose_say $_rose_code
done
"""

SHELLS = (
    "ONE='" + ONE.replace("'", "'\\''") + "'\nSESSION='" + SESSION.replace("'", "'\\''") + "'\n"
)
"""Both, as variables of a first process."""

INIT = SHELLS + (
    r"""
folder=$1
umask 022; mkdir -p -m 700 /run/rose; mkfifo -m 600 /run/rose/in; exec 8<>/run/rose/in
declare -A shells
while :; do
  read -r n name <&8 || continue
  if [ "$name" = - ]; then
    setsid bash --norc -c "$ONE" rose-command "$n" "$folder" 8>&- &
    continue
  fi
  if [ -z "${shells[$name]}" ] || ! kill -0 "${shells[$name]}" 2>/dev/null; then
    rm -f "/run/rose/s.$name"; mkfifo -m 600 "/run/rose/s.$name"; exec 7<>"/run/rose/s.$name"
    setsid bash --norc -c "$SESSION" rose-session "$name" "$folder" 9<&7 7>&- 8>&- &
    shells[$name]=$!
    echo "$n" >&7; exec 7>&-
  else
    echo "$n" 1<>"/run/rose/s.$name"
  fi
done
"""
)
