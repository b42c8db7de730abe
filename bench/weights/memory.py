"""What a Publisher's process holds beyond the trainer's own tensors, beside what its page states.

``docs/publisher.md``: ``buffers + 1`` copies of the model and one version's blocks. Measured as the
peak of a process of its own that publishes a version in full and then deltas as fast as it may.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.weights.plane import served

BUFFERS = 2
TENSORS, ROWS, COLUMNS = 12, 2048, 2048
VERSIONS = 6


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one process.

    Attributes:
        grown: its peak beyond what it held when the model was there and nothing was published.
        model: of the published tensors.
        blocks: of the largest version.
    """

    grown: int
    model: int
    blocks: int

    @property
    def stated(self) -> int:
        """What the page says."""
        return (BUFFERS + 1) * self.model + self.blocks


def publisher_bytes(folder: Path) -> HeldBytes:
    """Publish from a process of its own and look at its peak."""
    with served("serve", "--root", str(folder / "store")) as store:
        command = [sys.executable, "-m", "bench.weights.memory", store.address]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
    return HeldBytes(**json.loads(found.stdout.splitlines()[-1]))


def publish(address: str) -> HeldBytes:
    """Publish small ones until everything is loaded and compiled, then look, then publish."""
    import torch  # noqa: PLC0415  # slow, and only this process needs it

    from rose_trainer.publisher import Publisher  # noqa: PLC0415

    torch.manual_seed(0)
    with Publisher(address, "warm", buffers=BUFFERS) as warm:
        small = {"a.weight": torch.randn(512, 512).bfloat16()}
        for step in range(3):
            warm.publish(step, small)
            small["a.weight"][step] += 1
    model = {
        f"l{number}.gate_proj.weight": (torch.randn(ROWS, COLUMNS) / 50).bfloat16()
        for number in range(TENSORS)
    }
    before = _status("VmRSS:")
    # The peak until here is forgotten; only this process's own.
    Path("/proc/self/clear_refs").write_text("5")
    with Publisher(address, "bench", buffers=BUFFERS) as publisher:
        versions = []
        for step in range(VERSIONS):
            versions.append(publisher.publish(step, model))
            for tensor in model.values():
                tensor[step::97] *= 1.01
        sent = [publisher.wait(version).bytes for version in versions]
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    return HeldBytes(_status("VmHWM:") - before, size, max(sent))


def _status(field: str) -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index(field) + 1]) * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(publish(sys.argv[1]))))
