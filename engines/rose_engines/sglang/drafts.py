"""Drafted tokens that change nothing but speed: what stock SGLang's NGRAM needs for that.

SGLang 0.5.23 drafts from a corpus of tokens on the host, computes all drafts of a step at once, and
keeps those that sampling gives anyway. Three things in it would change the distribution:

| where | what SGLang does | here |
|---|---|---|
| any device | fills trees up with token 0, several times below the root | ``chain_padding`` |
| CPU | verifies as if the temperature were 0, whatever it is | ``sample_tree`` |
| CPU | its attention in plain torch knows no drafts | ``around_attention`` |

A sampler gives each child of a node its own chance, so token 0 would come up too often by as many
times as there are fillers.

The first is needed on GPUs too. The others stand in for kernels. Next step: ``plugin`` places the
hooks, ``rose_core.rollouts.engines.drafts`` decides what is drafted from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rose_core.rollouts.engines.drafts import MOST_TOKENS

BATCH_GET = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get"
_GREEDY = "sglang.srt.speculative.eagle_utils._verify_uses_greedy"
_ATTEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"
_SEPARATOR = -(2**31)  # SGLang's: no draft goes across it
NEEDED = (BATCH_GET, _GREEDY)


def chain_padding(
    tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Trees in which no node has two children of one token.

    Fillers are the last nodes of a tree: token 0 below the root. A draft that looks like one is
    treated alike, which only moves it.

    Args:
        tokens: (trees * size,) in the order of breadth first.
        mask: (trees * size * size,); [t, i, j] = node j is i or an ancestor of i.
        size: nodes of a tree.
    """
    trees, below = tokens.reshape(-1, size), mask.reshape(-1, size, size).copy()
    for tree, ancestors in zip(trees, below, strict=True):
        filler = size
        while filler > 1 and tree[filler - 1] == 0 and ancestors[filler - 1, 1:].sum() == 1:
            filler -= 1
        for node in range(filler, size):
            ancestors[node] = ancestors[node - 1]
            ancestors[node, node] = 1
    return tokens, below.reshape(-1)


def around_batch_get(
    original: Callable[..., Any],
    corpus: Any,  # noqa: ANN401  # SGLang's own types
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Hook: the drafts of one step."""
    tokens, mask = original(corpus, *args, **kwargs)
    return chain_padding(tokens, mask, corpus.draft_token_num)


class HostCorpus:
    """What the router sent to draft from, on the host of one scheduler; one text after another.

    SGLang's own route for it takes text or a file's name, and no token ids.

    Args:
        scheduler: SGLang's.
    """

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401  # SGLang's own types
        self._corpus = scheduler.draft_worker.ngram_corpus
        self._vocabulary = int(scheduler.model_config.vocab_size)
        self._lock = threading.Lock()
        self._loads = 0
        self._loaded = ""

    def replace(self, texts: list[list[int]]) -> int:
        """Draft from these texts from now on; returns how many tokens they have.

        Raises:
            ValueError: a token is none of the model's, or there are too many.
        """
        # A draft is looked up in the embedding: one beyond it would end the engine.
        if any(not 0 <= token < self._vocabulary for text in texts for token in text):
            message = f"drafts must be token ids from 0 to {self._vocabulary - 1}"
            raise ValueError(message)
        tokens = sum(map(len, texts))
        if tokens > MOST_TOKENS:
            message = f"an engine drafts from at most {MOST_TOKENS} tokens, got {tokens}"
            raise ValueError(message)
        with self._lock:
            before, self._loads = self._loaded, self._loads + 1
            name, self._loaded = f"rose-{self._loads}", ""
            if before:  # first: SGLang shares its drafts among all corpora that it has
                self._corpus.remove_external_corpus(before)
            if tokens:
                parts = [[_SEPARATOR, *text] for text in texts if text]
                loaded = self._corpus.load_external_corpus_named(name, parts)
                self._corpus.commit_external_corpus_load(name, loaded)
                self._loaded = name
        return tokens


def place_hooks(registry: Any, kinds: Any, *, cpu: bool) -> None:  # noqa: ANN401  # SGLang's own types
    """Place the hooks of an engine that drafts."""
    registry.register(BATCH_GET, around_batch_get, kinds.AROUND)
    if not cpu:
        return
    from sglang.srt.speculative import eagle_utils  # noqa: PLC0415  # imports CUDA's names

    eagle_utils.tree_speculative_sampling_target_only = sample_tree
    eagle_utils.sampling_softmax = _softmax
    eagle_utils.top_k_renorm_prob = _top_k
    eagle_utils.top_p_renorm_prob = _top_p
    registry.register(_GREEDY, _is_greedy, kinds.REPLACE)
    registry.register(_ATTEND, around_attention, kinds.AROUND)


def _is_greedy(*, is_all_greedy: bool, **_: object) -> bool:
    return is_all_greedy


def _softmax(logits: Any, *, temperatures: Any) -> Any:  # noqa: ANN401  # tensors
    import torch  # noqa: PLC0415  # slow to import, and most tests need none

    return torch.softmax(logits.float() / temperatures, dim=-1)


def _top_k(probabilities: Any, most: Any) -> Any:  # noqa: ANN401  # tensors
    ordered, places = probabilities.sort(dim=-1, descending=True)
    import torch  # noqa: PLC0415  # slow to import, and most tests need none

    rank = torch.arange(ordered.shape[-1])
    ordered[rank[None, :] >= most.view(-1, 1)] = 0.0
    kept = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return kept / kept.sum(-1, keepdim=True)


def _top_p(probabilities: Any, most: Any) -> Any:  # noqa: ANN401  # tensors
    import torch  # noqa: PLC0415  # slow to import, and most tests need none

    ordered, places = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before > most.view(-1, 1)] = 0.0
    kept = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return kept / kept.sum(-1, keepdim=True)


def sample_tree(
    *,
    predicts: Any,  # noqa: ANN401  # tensors
    accept_index: Any,  # noqa: ANN401
    accept_token_num: Any,  # noqa: ANN401
    candidates: Any,  # noqa: ANN401
    retrive_index: Any,  # noqa: ANN401
    retrive_next_token: Any,  # noqa: ANN401
    retrive_next_sibling: Any,  # noqa: ANN401
    uniform_samples: Any,  # noqa: ANN401
    uniform_samples_for_final_sampling: Any,  # noqa: ANN401
    target_probs: Any,  # noqa: ANN401
    **_: object,
) -> None:
    """Walk down each tree by chance, so that every token has the model's own probability.

    At a node the children are asked one after the other, with one coin for all of them: a child is
    taken while the coin lies below the sum of what was asked. If none is taken, the token is drawn
    from what is left of the distribution. So P(child) = p(child), and P(other) = p(other).
    """
    drafted, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins = uniform_samples.tolist()
    for tree in range(candidates.shape[0]):
        node, accepted = 0, [0]
        asked: list[int] = []
        while len(accepted) < accept_index.shape[1]:
            asked, taken = [], -1
            following, summed = child[tree][node], 0.0
            while following != -1:
                token = drafted[tree][following]
                asked.append(token)
                summed += float(target_probs[tree, node, token])
                if coins[tree][node] < summed:
                    taken = following
                    break
                following = sibling[tree][following]
            if taken == -1:
                break
            predicts[index[tree][node]] = drafted[tree][taken]
            node, asked = taken, []
            accepted.append(node)
        left = target_probs[tree, node].clone()
        left[asked] = 0.0
        sums = left.double().cumsum(-1)
        coin = float(uniform_samples_for_final_sampling[tree]) * float(sums[-1])
        predicts[index[tree][node]] = int((sums > coin).nonzero()[0]) if sums[-1] > 0 else asked[0]
        for order, one in enumerate(accepted):
            accept_index[tree, order] = index[tree][one]
        accept_token_num[tree] = len(accepted) - 1


def around_attention(  # noqa: PLR0917  # as SGLang calls it
    original: Callable[..., Any],
    backend: Any,  # noqa: ANN401  # SGLang's own types
    q: Any,  # noqa: ANN401
    k: Any,  # noqa: ANN401
    v: Any,  # noqa: ANN401
    layer: Any,  # noqa: ANN401
    forward_batch: Any,  # noqa: ANN401
    save_kv_cache: bool = True,
) -> Any:  # noqa: ANN401
    """Hook: attention of plain torch; a draft sees what is before its tree, and its ancestors."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    import torch  # noqa: PLC0415  # slow to import, and most tests need none
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: PLC0415

    pool, spec_info = backend.token_to_kv_pool, forward_batch.spec_info
    if save_kv_cache and k is not None:
        places = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, places, k, v)
    size, trees = spec_info.draft_token_num, len(forward_batch.seq_lens)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries = q.view(trees, size, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
    masks = spec_info.custom_mask.view(trees, size, size).bool()
    out = q.new_empty((trees, size, layer.tp_q_head_num * layer.v_head_dim))
    rows = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    for tree, before in enumerate(forward_batch.seq_lens.tolist()):
        seen = rows[tree, : before + size]
        mask = torch.cat((torch.ones(size, before, dtype=torch.bool), masks[tree]), dim=1)
        found = torch.nn.functional.scaled_dot_product_attention(
            queries[tree : tree + 1],
            keys[seen].transpose(0, 1)[None].to(q.dtype),
            values[seen].transpose(0, 1)[None].to(q.dtype),
            attn_mask=mask,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )
        out[tree] = found[0].transpose(0, 1).reshape(size, -1)
    return out.view(trees * size, -1)
