"""Ranks of a sharded trainer under gloo: ``python -m tests.trainer.ranks`` starts them as told.

They train nothing: they move bits of sharded tensors the same way on every rank and publish them,
in mode ``resume`` from the checkpoint of step 2 on. Rank 0 writes the full tensors of every version
for the test to compare.

PyTorch with FSDP takes longer to import than the ranks run, so one process imports it and forks
every rank of every job. Only what no fork may inherit (threads, connections) is made by the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rose_trainer.sharded import ShardedPublisher


def model(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Every placement that is understood, and sizes that do not divide evenly."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 33, bias=True).to(torch.bfloat16)
    fully_shard(linear, mesh=mesh)

    def placed(placement: Replicate | Shard, *shape: int) -> DTensor:
        return distribute_tensor(torch.randn(*shape).to(torch.bfloat16), mesh, [placement])

    return {
        **{f"fsdp.{name}": value for name, value in linear.state_dict().items()},
        "rows.weight": placed(Shard(0), 301, 512),
        "columns.o_proj.weight": placed(Shard(1), 256, 1024),
        "experts.weight": placed(Shard(0), 3, 40, 16),
        "norm.weight": placed(Replicate(), 96),
        "plain": torch.arange(7, dtype=torch.float32),
    }


def move(state: dict[str, torch.Tensor], step: int) -> None:
    """What a step does to the shards of this rank."""
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.view(torch.int16 if local.dtype is torch.bfloat16 else torch.int32)
        flat.view(-1)[step::37] += 1


def loaded(path: Path, state: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """A checkpoint of whole tensors, placed as the state is."""
    return {name: placed(whole, state[name], mesh) for name, whole in torch.load(path).items()}


def placed(whole: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A whole tensor cut over the ranks as another one is."""
    return distribute_tensor(whole, mesh, like.placements) if isinstance(like, DTensor) else whole


@dataclass(frozen=True)
class Job:
    """Ranks that are started together.

    Attributes:
        address: of the store.
        out: folder for the full tensors and for what each rank says.
        mode: ``publish``, ``resume``, ``in place`` or ``die``.
    """

    address: str
    out: str
    mode: str
    world: int

    def order(self) -> str:
        """A line for ``main``."""
        return json.dumps(asdict(self)) + "\n"

    def output_files(self, rank: int) -> tuple[Path, Path]:
        """Files with a rank's standard output and error."""
        name = f"{self.mode.replace(' ', '-')}-{self.world}-{rank}"
        return Path(self.out) / f"{name}.out", Path(self.out) / f"{name}.err"


def publish(job: Job, rank: int) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    meeting = Path(job.out) / f"rendezvous-{job.mode.replace(' ', '-')}-{job.world}"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=job.world
    )
    out, mode = Path(job.out), job.mode
    mesh = init_device_mesh("cpu", (job.world,))
    state = model(mesh)
    patience = 4.0 if mode == "die" else 60
    with ShardedPublisher(
        job.address,
        "run",
        patience_seconds=patience,
        compare_on="device" if mode == "in place" else "auto",
    ) as out_to:
        for step in (2, 3) if mode == "resume" else range(3):
            if step == 2 and mode == "resume":
                state = loaded(out / "2.pt", state, mesh)
            elif step:
                move(state, step)
            full = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in state.items()
            }
            if rank == 0:
                torch.save(full, out / f"{step}.pt")
            if mode == "die" and step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            done = out_to.publish(step, state)
            sys.stdout.write(
                f"{rank} {done.version} {done.digest} {done.bytes} {done.encode_seconds}\n"
            )
            sys.stdout.flush()
    dist.destroy_process_group()


def fork(job: Job, rank: int) -> int:
    """Start a rank; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    for number, path in enumerate(job.output_files(rank), start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    try:
        publish(job, rank)
    except BaseException:  # noqa: BLE001  # a rank never comes back into its parent's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    """One job a line; answers with a line when all its ranks have ended."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        for pid in [fork(job, rank) for rank in range(job.world)]:
            os.waitpid(pid, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
