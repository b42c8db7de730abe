"""``python -m rose_dev.gpu``: make GPUs, and let them fail, from a shell.

$ python -m rose_dev.gpu create STATE h100x8
$ python -m rose_dev.gpu library                # path of the built library
$ python -m rose_dev.gpu set STATE 3 temperature=91 throttle_reasons=64
$ python -m rose_dev.gpu lose STATE 3           # falls off the bus; recover brings it back
$ python -m rose_dev.gpu fault STATE 3 48       # an Xid
$ python -m rose_dev.gpu start STATE 3 PID BYTES
$ python -m rose_dev.gpu delay STATE 0.1        # every call takes 100 ms
$ python -m rose_dev.gpu calls STATE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rose_dev.errors import DevelopmentError
from rose_dev.gpu.library import library
from rose_dev.gpu.profiles import PROFILES
from rose_dev.gpu.state import State


def main(argv: list[str]) -> int:
    """Do one thing to a state."""
    parser = argparse.ArgumentParser(prog="rose_dev.gpu", description=__doc__)
    parser.add_argument("verb", choices=[*_VERBS, "create", "library"])
    parser.add_argument("operands", nargs="*", help="STATE, then what the verb takes")
    options = parser.parse_args(argv)
    try:
        _run(options.verb, options.operands)
    except (DevelopmentError, OSError, ValueError, LookupError) as error:
        sys.stderr.write(f"{options.verb}: {error or type(error).__name__}\n")
        return 1
    return 0


def _run(verb: str, operands: list[str]) -> None:
    if verb == "library":
        sys.stdout.write(f"{library()}\n")
        return
    if not operands:
        message = "name a state file"
        raise DevelopmentError(message)
    path, *rest = operands
    if verb == "create":
        profile = rest[0] if rest else next(iter(PROFILES))
        made = State.create(Path(path), profile, seed=rest[1] if len(rest) > 1 else "")
        sys.stdout.write("".join(f"{gpu.uuid}\n" for gpu in made.gpus))
        return
    _VERBS[verb](State.open(Path(path)), *rest)


def _set(state: State, gpu: str, *fields: str) -> None:
    for field in fields:
        name, _, value = field.partition("=")
        if not hasattr(state.gpu(gpu).raw, name):
            message = f"a GPU has no field {name!r}"
            raise DevelopmentError(message)
        setattr(state.gpu(gpu).raw, name, int(value, 0))


def _delay(state: State, seconds: str, function: str = "") -> None:
    state.delay(float(seconds), function)


def _calls(state: State) -> None:
    counts = sorted(state.calls().items(), key=lambda pair: -pair[1])
    sys.stdout.write("".join(f"{count:>8}  {name}\n" for name, count in counts))


_VERBS: dict[str, Callable[..., None]] = {
    "set": _set,
    "lose": lambda state, gpu: state.gpu(gpu).lose(),
    "recover": lambda state, gpu: state.gpu(gpu).recover(),
    "fault": lambda state, gpu, xid: state.gpu(gpu).fault(int(xid)),
    "start": lambda state, gpu, pid, used: state.gpu(gpu).start(int(pid), int(used)),
    "end": lambda state, gpu, pid: state.gpu(gpu).end(int(pid)),
    "fail": lambda state, function, code: state.fail(function, int(code)),
    "delay": _delay,
    "calls": _calls,
    "unload": lambda state: state.unload_driver(),
    "load": lambda state: state.load_driver(),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
