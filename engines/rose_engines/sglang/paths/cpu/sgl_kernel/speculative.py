"""What SGLang's CPU engine calls to verify drafted tokens, in plain torch.

Each follows the contract of the kernel whose name it has. A batch has ``bs`` requests of ``n``
nodes each; node 0 is the last token of the request and the root of its tree. Loops are over nodes,
never over the vocabulary. Next step: ``rose_engines.sglang.drafts`` samples.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch


def reconstruct_indices_from_tree_mask(  # noqa: PLR0917  # the kernel's own
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of every tree from who is whose ancestor.

    ``tree_mask`` is (bs * n * n,) of bool: [b, i, j] = node j is i or an ancestor of i. The others
    are written: (bs * n,) positions, and three times (bs, n).
    """
    n = draft_token_num
    node = torch.arange(n)
    ancestors = tree_mask.view(batch_size, n, n).bool() & (node < node[:, None])
    depth = ancestors.sum(-1)
    positions.copy_((depth + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    parents = torch.where(ancestors.any(-1), (ancestors * node).amax(-1), -1)
    for tree, parent in enumerate(parents.tolist()):
        first, later = [-1] * n, [-1] * n
        for i in reversed(range(1, n)):
            later[i], first[parent[i]] = first[parent[i]], i
        retrieve_next_token[tree] = torch.tensor(first)
        retrieve_next_sibling[tree] = torch.tensor(later)


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the drafts that are what the model would have sampled.

    ``accept_index`` (bs, most) gets the nodes on the way, ``accept_token_num`` how many of them
    were drafts, ``predicts`` (bs * n,) the token after each of them.
    """
    drafted, wanted = candidates.tolist(), target_predict.tolist()
    index = retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for tree in range(candidates.shape[0]):
        node, accepted = 0, [0]
        while len(accepted) < accept_index.shape[1]:
            following = child[tree][node]
            while following != -1 and drafted[tree][following] != wanted[tree][node]:
                following = sibling[tree][following]
            if following == -1:
                break
            node = following
            accepted.append(node)
        for node in accepted:
            predicts[index[tree][node]] = wanted[tree][node]
        places = [index[tree][node] for node in accepted]
        accept_index[tree, : len(places)] = torch.tensor(places, dtype=accept_index.dtype)
        accept_token_num[tree] = len(accepted) - 1


def assign_extend_cache_locs_cpu(  # noqa: PLR0917  # the kernel's own
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001  # the kernel's own
) -> None:
    """Places of the KV of each request's tokens from ``start_offset`` to ``end_offset``."""
    for row, tokens, places in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[places] = req_to_token[row, tokens]


def assign_req_to_token_pool_cpu(  # noqa: PLR0917  # the kernel's own
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001  # the kernel's own
) -> None:
    """Write places of KV into each request's row from ``start_offset`` to ``end_offset``."""
    for row, tokens, places in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, tokens] = out_cache_loc[places].to(req_to_token.dtype)


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Each request's row, its tokens there, and where their places lie, all after one another."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, slice(start, end), slice(begin, begin + end - start)
        begin += end - start


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Places of the KV of what was accepted, one after the other."""
    chosen = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: len(chosen)] = out_cache_loc[chosen]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV of all layers from one place to another; ``strides`` are bytes of a place."""
    moves = [
        (source, target)
        for source, target in zip(src_loc.tolist(), tgt_loc.tolist(), strict=True)
        if source != target
    ]
    if not moves:
        return
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # All are read before any is written: a place may be source and target.
        kept = [ctypes.string_at(base + source * size, size) for source, _ in moves]
        for (_, target), what in zip(moves, kept, strict=True):
            ctypes.memmove(base + target * size, what, size)
