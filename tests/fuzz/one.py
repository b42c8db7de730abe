"""``python -m tests.fuzz.one TARGET ...``: libFuzzer on one target; ``run`` starts it."""

import sys

import atheris

with atheris.instrument_imports(include=["rose_core", "rose_agent", "rose_router", "rose_wire"]):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()
