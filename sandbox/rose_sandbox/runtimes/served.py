"""The first process of a sandbox of gVisor, which answers its host at two pipes.

The host sees none of such a sandbox's processes, memory or ``/run``. So its first process does for
the host what ``runc``'s does itself: it takes commands, says how they ended, gives files and takes
them. What a command has lies in ``/run/rose``, as in ``inside``, and its shells are the same.

A request is a line, ``ID WHAT ARGUMENTS``, and what ``WHAT`` says comes behind. An answer is a
line, ``ID WORD BYTES``, and so many bytes. Nothing that a tenant's program does to the first
process or to its programs reaches further than its own sandbox: the host reads words and bytes.

| request | then | answer |
|---|---|---|
| ``hello`` | | ``ok``: the way out is open |
| ``run N SESSION BYTES`` | the command; a zero byte up to ``SHORT`` | ``ok``, ``bad`` |
| ``look N`` | | ``done`` and how it ended, ``gone``, ``wait`` |
| ``kill N HARD`` | | ``ok``; ``none``: it has no runner, and never runs |
| ``drop N`` | | ``ok`` |
| ``join PORT NAME`` | | ``ok``: a connection of that port comes to a socket in ``WAY``; ``none`` |
| ``part`` | | ``ok``: these have ended, and those on the way out; no new one begins |
| ``get LIMIT`` | a path and a zero byte | ``ok`` and the file, ``none``, ``large`` |
| ``put MODE BYTES`` | a path and a zero byte; after ``go`` the bytes | ``bad``; ``ok``, ``full`` |

An empty line is passed over: a zero byte and one end what a host that died had begun.
Next step: ``channel`` asks.
"""

from __future__ import annotations

from rose_sandbox.runtimes.inside import SHELLS

SHORT = 65536
"""Bytes that bash reads itself, each by a call; more are a program's to read."""

WAY = "/run/rose-way"
"""Folder of sockets of the host, to which ``socat`` of the image carries connections."""

SERVED = SHELLS + (
    r"""
folder=$1
at=/run/rose
umask 022; mkdir -p -m 700 $at
exec 9<&0 8>&1 0</dev/null 1>/dev/null 2>/dev/null
declare -A shells
way=/run/rose-way
declare -A joined
out=
if [ -n "$2" ]; then
  socat TCP-LISTEN:3128,bind=127.0.0.1,reuseaddr,fork UNIX-CONNECT:$way/proxy 8>&- 9>&- &
  out=$!
fi

# Word, text.
answer() { local LC_ALL=C; printf '%s %s %s\n%s' "$id" "$1" "${#2}" "$2" >&8; }

begin() {
  printf '%s ' /proc/[0-9]* >$at/$1.was
  if [ "$2" = - ]; then
    setsid bash --norc -c "$ONE" rose-command "$1" "$folder" 8>&- 9>&- &
  elif [ -z "${shells[$2]}" ] || ! kill -0 "${shells[$2]}"; then
    rm -f "$at/s.$2"; mkfifo -m 600 "$at/s.$2"; exec 7<>"$at/s.$2"
    setsid bash --norc -c "$SESSION" rose-session "$2" "$folder" 9<&7 7>&- 8>&- &
    shells[$2]=$!
    echo "$1" >&7; exec 7>&-
  else
    echo "$1" 1<>"$at/s.$2"
  fi
}

# What a command's runner has started since it began; hard: the runner too. It says who it is
# before it reads what to run. Where it has, nothing is begun here: it may have taken all processes.
# All stand still before any is killed: a shell whose child dies first goes on to its next line.
# Parents stop before their children; what was being born meanwhile is found by the next look.
end() {
  local hard=$2 top pid line parent session new word looks
  local -A was=() parents=() sessions=() below=()
  local -a doomed=()
  [ -e $at/$1.pid ] || rm -f $at/$1.cmd
  read -r top <$at/$1.pid || return 1
  read -r line <$at/$1.was; for word in $line; do was[${word#/proc/}]=1; done
  [ -d /proc/$top ] || return 0
  below[$top]=1
  if [ -n "$hard" ]; then kill -STOP "$top"; doomed=("$top"); fi
  for looks in {1..8}; do
    for word in /proc/[0-9]*/stat; do
      read -r line <$word || continue
      pid=${word#/proc/}; pid=${pid%/stat}
      read -r _ parent _ session _ <<<"${line##*) }"
      parents[$pid]=$parent; sessions[$pid]=$session
    done
    new=1 word=${#doomed[@]}
    while [ -n "$new" ]; do
      new=
      for pid in "${!parents[@]}"; do
        parent=${parents[$pid]}
        [ -z "${below[$pid]}" ] || continue
        if [ -n "${below[$parent]}" ] ||
          { [ "${sessions[$pid]}" = "$top" ] && [ "${sessions[$parent]}" != "$top" ]; }
        then
          below[$pid]=1 new=1
          [ -n "${was[$pid]}" ] || { kill -STOP "$pid"; doomed+=("$pid"); }
        fi
      done
    done
    [ ${#doomed[@]} != "$word" ] || break
  done
  [ ${#doomed[@]} = 0 ] || kill -9 "${doomed[@]}"
  return 0
}

# A file of up to so many bytes. It has as many as were promised, whatever happens to it meanwhile.
give() {
  local LC_ALL=C text= bytes
  [ -f "$1" ] || { answer none; return; }
  if ! IFS= read -r -d '' -n 65536 text <"$1"; then
    if [ ${#text} -gt "$2" ]; then answer large; else answer ok "$text"; fi
    return
  fi
  bytes=$(stat -L -c %s -- "$1")
  if [ "${bytes:-0}" -gt "$2" ]; then answer large; return; fi
  printf '%s ok %s\n' "$id" "${bytes:-0}" >&8
  { head -c "${bytes:-0}" -- "$1"; head -c "${bytes:-0}" /dev/zero; } | head -c "${bytes:-0}" >&8
}

take() {
  local path=$1 said=
  if [ -e "$path" ] && [ ! -f "$path" ] || ! mkdir -p -- "${path%/*}/"; then answer bad; return; fi
  [ -e "$path" ] || said=new
  if ! : >"$path"; then answer bad; return; fi
  [ -z "$said" ] || chmod "$2" -- "$path"
  answer go
  head -c "$3" <&9 | { cat >"$path"; said=$?; cat >/dev/null; exit $said; }
  if [ $? = 0 ]; then answer ok; else answer full; fi
}

while :; do
  read -r id what a b c <&9 || continue
  case $what in
  hello) [ -z "$out" ] || kill -CONT $out; answer ok ;;
  run)
    if [ "$c" -le 65536 ]; then IFS= read -r -d '' text <&9; printf '%s' "$text" >$at/$a.cmd
    else head -c "$c" <&9 >$at/$a.cmd; fi
    if [ $? = 0 ]; then answer ok; begin "$a" "$b"; else answer bad; fi ;;
  look)
    if read -r text <$at/$a.rc; then answer 'done' "$text"
    elif read -r pid <$at/$a.pid && [ ! -d /proc/$pid ] && ! read -r text <$at/$a.rc
    then answer gone
    else answer wait; fi ;;
  kill) if end "$a" "$b"; then answer ok; else answer none; fi ;;
  drop) rm -f $at/$a.{cmd,pid,rc,out,err,was} & answer ok ;;
  get) IFS= read -r -d '' path <&9; give "$path" "$a" ;;
  join)
    if : <>/dev/tcp/127.0.0.1/$a; then
      socat TCP:127.0.0.1:$a UNIX-CONNECT:$way/$b 8>&- 9>&- &
      joined[$!]=1; answer ok
    else answer none; fi ;;
  part)
    for pid in "${!joined[@]}"; do kill -9 $pid; wait $pid; done
    joined=()
    if [ -n "$out" ]; then
      kill -STOP $out
      for file in /proc/[0-9]*/stat; do
        read -r line <$file || continue
        read -r _ parent _ <<<"${line##*) }"
        [ "$parent" != $out ] || { pid=${file#/proc/}; kill -9 ${pid%/stat}; }
      done
    fi
    answer ok ;;
  put) IFS= read -r -d '' path <&9; take "$path" "$a" "$b" ;;
  esac
done
"""
)
