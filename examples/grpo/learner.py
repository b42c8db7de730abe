"""GRPO with truncated importance sampling, in plain PyTorch.

Advantages are the turn's return standardised inside its group, so no critic is needed. The batch
was sampled by engines, perhaps some versions ago; each token is weighted by
``min(pi_now / pi_engine, truncation)`` with the engine's own log-prob as the behaviour policy, so
neither staleness nor different arithmetic biases the step silently.

Shapes: B trajectories, L tokens of the longest, right-padded; attention is causal, so padding
behind the last token changes nothing before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.grpo.errors import ModelMismatch
from examples.grpo.rollouts import Group, Trajectory
from examples.grpo.task import ANSWER_TOKENS, HIGHEST_ID, TURNS, Task


@dataclass(frozen=True)
class Batch:
    """One step's worth of trajectories as tensors, all of shape (B, L - 1) but ``tokens``.

    Attributes:
        tokens: (B, L) ids.
        sampled: 1 where the *next* token was sampled by an engine.
        behaviour: the engine's log-prob of the next token, 0 elsewhere.
        advantages: of the turn the next token belongs to, 0 elsewhere.
    """

    tokens: torch.Tensor
    sampled: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor

    def shuffled(self, generator: torch.Generator) -> Batch:
        """The same tokens with advantages handed to other trajectories: nothing to learn."""
        order = torch.randperm(len(self.tokens), generator=generator)
        return Batch(self.tokens, self.sampled, self.behaviour, self.advantages[order])


@dataclass(frozen=True)
class StepStatistics:
    """What one step saw.

    Attributes:
        ratio_mean, truncated_share: importance ratios against the engines, and the share cut.
        gradient_norm: before clipping.
    """

    loss: float
    ratio_mean: float
    truncated_share: float
    gradient_norm: float


@dataclass
class _Seen:
    """Sums over the parts of a step."""

    tokens: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0
    truncated: float = 0.0


def advantages(group: Group) -> list[list[float]]:
    """Advantage of every turn of every member: standardised over the group, turn by turn."""
    rewards = np.array([member.rewards for member in group])
    centred = rewards - rewards.mean(axis=0)
    standardised: list[list[float]] = (centred / (rewards.std(axis=0) + 1e-4)).tolist()
    return standardised


def make_batch(groups: Sequence[Group]) -> Batch:
    """Lay trajectories out as tensors."""
    members = [member for group in groups for member in group]
    values = [value for group in groups for value in advantages(group)]
    longest = max(len(member.context) for member in members)
    tokens = torch.zeros(len(members), longest, dtype=torch.long)
    sampled, behaviour, advantage = (torch.zeros(len(members), longest - 1) for _ in range(3))
    for row, (member, member_values) in enumerate(zip(members, values, strict=True)):
        tokens[row, : len(member.context)] = torch.tensor(member.context)
        for start, turn, value in zip(member.starts, member.turns, member_values, strict=True):
            # The logits at position i speak about token i + 1.
            place = slice(start - 1, start - 1 + len(turn.tokens))
            sampled[row, place] = 1.0
            behaviour[row, place] = torch.tensor(turn.logprobs)
            advantage[row, place] = value
    return Batch(tokens, sampled, behaviour, advantage)


class Policy:
    """The model being trained, its optimizer, and sampling from it for evaluation.

    Args:
        folder: Hugging Face model folder.
        learning_rate: of Adam.
        truncation: most weight a token may get.
    """

    def __init__(self, folder: Path, *, learning_rate: float, truncation: float = 2.0) -> None:
        import transformers  # noqa: PLC0415  # slow to import, and tests read this module without it

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._check_vocabulary(folder)
        self._truncation = truncation
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95)
        )
        self._seen = _Seen()

    def _check_vocabulary(self, folder: Path) -> None:
        size = int(self.model.config.vocab_size)
        if size <= HIGHEST_ID:
            message = f"{folder}: vocabulary of {size}, the task needs more than {HIGHEST_ID}"
            raise ModelMismatch(message)

    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-prob of each next token; (B, L) -> (B, L - 1)."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits
        chosen: torch.Tensor = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None])
        return chosen[..., 0]

    def add(self, part: Batch) -> None:
        """Add the gradients of a part of a step; the weights stay what they are.

        Sums, not means: how many tokens the step has is known with its last part. Parts in the
        same order give the same bits, whenever each of them came.
        """
        current = self.logprobs(part.tokens)
        ratio = torch.exp(current.detach() - part.behaviour) * part.sampled
        weight = ratio.clamp(max=self._truncation)
        loss = -(weight * part.advantages * current).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self._seen.tokens += float(part.sampled.sum())
        self._seen.loss += float(loss.detach())
        self._seen.ratio += float(ratio.sum())
        self._seen.truncated += float((ratio > self._truncation).sum())

    def finish(self) -> StepStatistics:
        """Step with the gradients of all parts that were added since the last one."""
        seen, self._seen = self._seen, _Seen()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(seen.tokens)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepStatistics(
            loss=seen.loss / seen.tokens,
            ratio_mean=seen.ratio / seen.tokens,
            truncated_share=seen.truncated / seen.tokens,
            gradient_norm=float(norm),
        )

    def step(self, batch: Batch) -> StepStatistics:
        """One gradient step of a single part."""
        self.add(batch)
        return self.finish()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights as they are published: HF names, bfloat16, what the engines will hold."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(torch.bfloat16)

    def published_state(self) -> dict[str, torch.Tensor]:
        """The same values in float32, to recompute what an engine should have said."""
        return {name: tensor.float() for name, tensor in self.named_tensors()}

    @torch.no_grad()
    def logprobs_with(
        self, state: Mapping[str, torch.Tensor], tokens: torch.Tensor
    ) -> torch.Tensor:
        """``logprobs`` under other weights; (B, L) -> (B, L - 1)."""
        arguments = {"input_ids": tokens[:, :-1], "use_cache": False}
        output = torch.func.functional_call(self.model, dict(state), (), arguments)
        chosen = torch.gather(output.logits.log_softmax(-1), 2, tokens[:, 1:, None])
        return chosen[..., 0]

    @torch.no_grad()
    def rewards(self, tasks: Sequence[Task], seed: int) -> list[float]:
        """Reward of each task, sampled here with a seeded generator; paired across policies."""
        generator = torch.Generator().manual_seed(seed)
        contexts = [task.opening() for task in tasks]
        totals = [0.0] * len(tasks)
        for turn in range(TURNS):
            answers = self._sample(torch.tensor(contexts), generator).tolist()
            for row, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
                totals[row] += task.reward(turn, answer) / TURNS
                contexts[row] += answer
                if turn + 1 < TURNS:
                    contexts[row] += task.observation(turn, answer)
        return totals

    def _sample(self, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(B, L) -> (B, ANSWER_TOKENS) sampled ids."""
        cache, step, answers = None, tokens, []
        for _ in range(ANSWER_TOKENS):
            output = self.model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            step = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
            answers.append(step)
        return torch.cat(answers, dim=1)


def sampled_pairs(
    batch: Batch, logprobs: torch.Tensor, rows: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(behaviour, recomputed) log-probs of the sampled tokens in ``rows``, flat float64."""
    chosen = list(rows)
    mask = batch.sampled[chosen] > 0
    behaviour = batch.behaviour[chosen][mask].double().numpy()
    return behaviour, logprobs[chosen][mask].double().numpy()


def one_version(member: Trajectory) -> str | None:
    """The version that sampled the whole trajectory on keys of its own, or None."""
    versions = member.versions()
    own = all(turn.own_keys for turn in member.turns)
    return next(iter(versions)) if own and len(versions) == 1 else None


def pool(member: Trajectory) -> str:
    """Kinds of engine that made the trajectory, for the mismatch meter."""
    return "+".join(sorted({kind for turn in member.turns for kind in turn.engines}))
