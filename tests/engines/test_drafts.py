"""Drafts change no distribution: the tree that is verified, the rule, and its stand-ins."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rose_engines
from rose_core.rollouts.engines.drafts import MOST_TOKENS
from rose_core.wire.sync import EngineSpec
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import DRAFTS_VARIABLE, command, environment
from rose_engines.sglang.drafts import HostCorpus, chain_padding, sample_tree

NODES, VOCABULARY, ROOT = 6, 5, 4
# Two answers that begin alike, and a filler: 4 -> {1 -> 3, 2}, then twice what fills up.
TOKENS = np.array([ROOT, 1, 2, 3, 0, 0])
PARENTS = [-1, 0, 0, 1, 0, 0]


def mask_of(parents: list[int]) -> np.ndarray[Any, Any]:
    """[i, j] = node j is i or an ancestor of i."""
    mask = np.zeros((len(parents), len(parents)), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = 1
    return mask


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The stand-ins, as an engine on CPU imports them."""
    folder = Path(rose_engines.__file__).parent / "sglang/paths/cpu/sgl_kernel"
    spec = importlib.util.spec_from_file_location("stand_ins", folder / "speculative.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def links(kernels: ModuleType, mask: np.ndarray[Any, Any], trees: int) -> tuple[torch.Tensor, ...]:
    """Index, first child and next sibling of every node, and the positions."""
    size = mask.shape[0]
    index, child, sibling = (torch.empty(trees, size, dtype=torch.int64) for _ in range(3))
    positions = torch.empty(trees * size, dtype=torch.int64)
    whole = torch.from_numpy(np.tile(mask.ravel(), trees)).bool()
    lengths = torch.full((trees,), 10)
    kernels.reconstruct_indices_from_tree_mask(
        whole, lengths, positions, index, child, sibling, trees, size
    )
    return index, child, sibling, positions


def sampled(kernels: ModuleType, mask: np.ndarray[Any, Any], trees: int) -> list[list[int]]:
    """What each of so many trees gives: the accepted drafts and the token after them."""
    index, child, sibling, _ = links(kernels, mask, trees)
    draw = torch.Generator().manual_seed(17)
    predicts = torch.zeros(trees * NODES, dtype=torch.int32)
    accepted = torch.full((trees, NODES), -1, dtype=torch.int32)
    counts = torch.empty(trees, dtype=torch.int32)
    sample_tree(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.from_numpy(np.tile(TOKENS, (trees, 1))),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        uniform_samples=torch.rand(trees, NODES, generator=draw),
        uniform_samples_for_final_sampling=torch.rand(trees, generator=draw),
        target_probs=probabilities().expand(trees, NODES, VOCABULARY),
        threshold_single=1.0,
    )
    return [
        predicts[row[: count + 1].long()].tolist()
        for row, count in zip(accepted, counts.tolist(), strict=True)
    ]


def probabilities() -> torch.Tensor:
    """What the model says after each node; token 0 is likely, since fillers are of it."""
    draw = torch.Generator().manual_seed(3)
    return torch.softmax(torch.rand(NODES, VOCABULARY, generator=draw) * 2, dim=-1)


def chi_square(seen: list[int], expected: torch.Tensor) -> float:
    """Of tokens, against their probabilities; four degrees of freedom."""
    counts = torch.bincount(torch.tensor(seen), minlength=VOCABULARY).double()
    wanted = expected.double() * len(seen)
    return float(((counts - wanted) ** 2 / wanted).sum())


TAIL = 23.5  # of four degrees of freedom: one in ten thousand lies above it


@pytest.mark.parametrize(
    "trees",
    [20_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_sampled_tokens_have_the_models_own_distribution(kernels: ModuleType, trees: int) -> None:
    _, mask = chain_padding(TOKENS, mask_of(PARENTS).ravel(), NODES)
    reported = sampled(kernels, mask.reshape(NODES, NODES), trees)
    expected = probabilities()
    assert chi_square([one[0] for one in reported], expected[0]) < TAIL
    for node, before in ((1, [1]), (2, [2]), (3, [1, 3])):
        after = [one[len(before)] for one in reported if one[: len(before)] == before]
        assert len(after) > trees / 100
        assert chi_square(after, expected[node]) < TAIL


def test_fillers_below_the_root_would_give_token_0_another_chance_each(
    kernels: ModuleType,
) -> None:
    """What stock SGLang makes of a short tree, which is why its padding is chained."""
    reported = sampled(kernels, mask_of(PARENTS), 20_000)
    assert chi_square([one[0] for one in reported], probabilities()[0]) > 50 * TAIL


def test_no_node_has_two_children_of_one_token() -> None:
    trees = [(TOKENS, PARENTS), (np.array([7, 0, 0, 0]), [-1, 0, 0, 0])]
    for tokens, parents in trees:
        size = len(tokens)
        same, mask = chain_padding(tokens, mask_of(parents).ravel(), size)
        assert (same == tokens).all()
        rows = mask.reshape(size, size)
        above = [int(np.flatnonzero(rows[node, :node]).max()) for node in range(1, size)]
        children = list(zip(above, tokens[1:], strict=True))
        assert len(set(children)) == len(children)


def test_the_stand_ins_follow_the_tree(kernels: ModuleType) -> None:
    index, child, sibling, positions = links(kernels, mask_of([-1, 0, 0, 1]), 2)
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child[0].tolist() == [1, 3, -1, -1]
    assert sibling[0].tolist() == [-1, 2, -1, -1]
    assert positions.tolist() == [10, 11, 11, 12] * 2
    predicts = torch.zeros(8, dtype=torch.int32)
    accepted = torch.full((2, 4), -1, dtype=torch.int32)
    counts = torch.empty(2, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]]),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor([[1, 3, 5, 6], [2, 3, 5, 6]]),
    )
    assert accepted.tolist() == [[0, 1, 3, -1], [4, 6, -1, -1]]
    assert counts.tolist() == [2, 1]
    assert predicts.tolist() == [1, 3, 0, 6, 2, 0, 5, 0]


def test_kv_is_moved_also_where_places_overlap(kernels: ModuleType) -> None:
    pool = torch.arange(8, dtype=torch.float32).view(4, 2)
    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([pool.data_ptr()]),
        torch.tensor([8]),
        torch.tensor([0, 1]),
        torch.tensor([1, 3]),
    )
    assert pool.tolist() == [[2, 3], [6, 7], [4, 5], [6, 7]]


class Corpus:
    """SGLang's, as far as the plugin calls it."""

    def __init__(self) -> None:
        self.loaded: dict[str, list[list[int]]] = {}

    def load_external_corpus_named(self, name: str, chunks: list[list[int]]) -> int:
        self.loaded[name] = chunks
        return sum(map(len, chunks))

    def commit_external_corpus_load(self, name: str, tokens: int) -> None:
        assert sum(map(len, self.loaded[name])) == tokens

    def remove_external_corpus(self, name: str) -> None:
        del self.loaded[name]


def test_an_engine_has_one_corpus_of_tokens_that_its_model_has() -> None:
    corpus = Corpus()
    scheduler = SimpleNamespace(
        draft_worker=SimpleNamespace(ngram_corpus=corpus),
        model_config=SimpleNamespace(vocab_size=100),
    )
    host = HostCorpus(scheduler)
    assert host.replace([[1, 2], [3]]) == 3
    (first,) = corpus.loaded.values()
    assert [chunk[1:] for chunk in first] == [[1, 2], [3]]
    with pytest.raises(ValueError, match="0 to 99"):
        host.replace([[100]])
    with pytest.raises(ValueError, match="at most"):
        host.replace([[1] * (MOST_TOKENS + 1)])
    assert len(corpus.loaded) == 1
    assert host.replace([[5]]) == 1
    assert len(corpus.loaded) == 1
    assert host.replace([]) == 0
    assert not corpus.loaded


@pytest.mark.parametrize(("running", "nodes"), [(8, "8"), (30, "3"), (64, "")])
def test_a_step_verifies_no_more_than_the_shortest_chunk(running: int, nodes: str) -> None:
    """A permit that closes waits for the step under way: D stays what chunks make it."""
    launch = Launch(python=Path("python"), model=Path("m"), port=1, drafts=True)
    spec = EngineSpec(engine_class="c", model="m", max_running=running, drafts=True)
    argv = command(spec, launch)
    reported = dict(itertools.pairwise(argv))
    assert reported.get("--speculative-num-draft-tokens", "") == nodes
    if nodes:
        assert running * int(nodes) <= int(reported["--chunked-prefill-size"]) // 4
        assert reported["--speculative-algorithm"] == "NGRAM"
    assert environment(launch, {})[DRAFTS_VARIABLE] == "1"


def test_without_the_field_nothing_is_drafted() -> None:
    launch = Launch(python=Path("python"), model=Path("m"), port=1)
    assert not any("speculative" in one for one in command(EngineSpec("c", "m"), launch))
    assert DRAFTS_VARIABLE not in environment(launch, {})
