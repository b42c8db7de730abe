"""Deltas of the example trainer's own optimizer, beside the layouts of other projects.

``examples.grpo`` takes GRPO steps on a small model: its loss, its Adam, its cast to BF16. Answers
are drawn evenly instead of sampled by an engine, which is what a model that has just been made says
anyway; rewards are the example's. Every byte counts as for the reference generator: our manifest,
both digest tables and gRPC's framing, of all tensors; of the others' layouts the payload alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from bench.weights.ours import wire_bytes
from bench.weights.peers import PEERS
from examples.grpo.learner import Batch, Policy
from examples.grpo.task import ANSWER_TOKENS, draw
from rose_core.delta import Builder, Manifest, TensorSpec, name_of, table
from rose_core.delta.bits import Bits
from rose_core.identity import WeightVersion
from rose_dev.models import make_named

RATE = 3e-6
WARM, MEASURED = 12, 4
GROUPS, MEMBERS = 8, 8
State = dict[str, Bits]


@dataclass(frozen=True)
class Sizes:
    """Bytes per changed element, over several steps together.

    Attributes:
        density: share of the elements that a step changes.
        ours: bytes per changed element, v1 and v2.
        peers: the same of the others' layouts.
    """

    density: float
    ours: tuple[float, float]
    peers: dict[str, float]


def states() -> tuple[dict[str, tuple[int, ...]], list[State]]:
    """Shapes, and published states: the first one when the optimizer's moments have settled."""
    torch.manual_seed(0)
    policy = Policy(make_named("mid"), learning_rate=RATE)
    source = random.Random(0)
    found = []
    for number in range(WARM + MEASURED):
        policy.step(batch(policy, source))
        if number >= WARM - 1:
            found.append({name: _bits(one) for name, one in policy.named_tensors()})
    return {name: tuple(one.shape) for name, one in policy.named_tensors()}, found


def _bits(tensor: torch.Tensor) -> Bits:
    bits: Bits = tensor.view(torch.int16).numpy().view(np.uint16).ravel().copy()
    return bits


def batch(policy: Policy, source: random.Random) -> Batch:
    """Groups that answer one task each, with the first turn's rewards."""
    rows, rewards = [], []
    for _ in range(GROUPS):
        task = draw(source)
        for _ in range(MEMBERS):
            answer = [source.randrange(256) for _ in range(ANSWER_TOKENS)]
            rows.append(task.opening() + answer)
            rewards.append(task.reward(0, answer))
    tokens = torch.tensor(rows)
    grouped = torch.tensor(rewards).view(GROUPS, MEMBERS)
    centred = grouped - grouped.mean(1, keepdim=True)
    advantages = (centred / (grouped.std(1, correction=0, keepdim=True) + 1e-4)).view(-1, 1)
    sampled = torch.zeros(len(rows), tokens.shape[1] - 1)
    sampled[:, -ANSWER_TOKENS:] = 1
    with torch.no_grad():
        behaviour = policy.logprobs(tokens) * sampled
    return Batch(tokens, sampled, behaviour, advantages * sampled)


class NotReproduced(Exception):
    """The blocks do not make the state they were made of: no figure counts."""


class Coder:
    """One publisher's line of versions in memory, with the product's own builder.

    Args:
        shapes: of every tensor.
        first: the state to start from.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], first: State) -> None:
        self._tensors = table(TensorSpec(name, "BF16", shapes[name]) for name in first)
        self._blocks: dict[bytes, bytes] = {}
        self._state = first
        bare = Builder(self._tensors, None, self._keep)
        for tensor in self._tensors:
            bare.add(None, first[tensor.name], blocks=False)
        self._last = bare.finish(WeightVersion("example", 1, 0))

    def code(self, new: State) -> tuple[Manifest, Manifest]:
        """The next version in its first form, and coded on its base.

        Raises:
            NotReproduced: one of them makes another state.
        """
        builder = Builder(self._tensors, self._last, self._keep, on_base=True)
        for tensor in self._tensors:
            builder.add(self._state[tensor.name], new[tensor.name])
        target = self._last.target
        manifest = builder.finish(WeightVersion(target.run, 1, target.sequence + 1))
        forms = manifest, builder.on_base(manifest) or manifest
        for form in forms:
            self._check(form, new)
        self._state, self._last = new, manifest
        return forms

    def _check(self, manifest: Manifest, new: State) -> None:
        made = {name: bits.copy() for name, bits in self._state.items()}
        for block in manifest.blocks:
            tensor = manifest.tensors[block.tensor]
            flat = made[tensor.name]
            old = tensor.tiling.cut(self._state[tensor.name], block.tile)
            changes = manifest.read(block, self._blocks[block.sha256], old)
            where = manifest.positions(block, changes)
            flat[where] = changes.resolve(flat[where], tensor.kind)
        if not all(np.array_equal(made[name], new[name]) for name in new):
            message = f"{manifest.target} is not what its blocks make"
            raise NotReproduced(message)

    def _keep(self, data: bytes) -> None:
        self._blocks[name_of(data)] = data


def measure() -> Sizes:
    """Every measured step, coded by everybody.

    Raises:
        NotReproduced: ours do not make the state.
    """
    shapes, (before, *later) = states()
    coder = Coder(shapes, before)
    changes = elements = first = second = 0
    peers = dict.fromkeys(PEERS, 0)
    for after in later:
        manifest, smaller = coder.code(after)
        changes, elements = changes + manifest.changes, elements + manifest.elements
        first, second = first + wire_bytes(manifest), second + wire_bytes(smaller)
        moved = [name for name in after if not np.array_equal(before[name], after[name])]
        for layout, peer in PEERS.items():
            peers[layout] += sum(peer(before[name], after[name]) for name in moved)
        before = after
    sizes = {layout: size / changes for layout, size in peers.items()}
    return Sizes(changes / elements, (first / changes, second / changes), sizes)
