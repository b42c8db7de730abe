"""How many tokens of a prompt a rollout engine prefills before it looks at its permit again.

An engine that is to stop ends its chunk first, while serving waits. So a chunk is as long as it may
take at the end of the lease's context. Engines are started with it, and the simulator's chunks are
as long; a permit divides it where a pool's SLO is near (``certificate``).
"""

from __future__ import annotations

# The aim of gpu-check: from the order to the last kernel.
_CHUNK_MS = 25.0
# Over several GPUs a chunk of 20 ms is ended with its engine (decision 0190).
_CHUNK_TOGETHER_MS = 15.0
# An 8B on an H200 took 28 ms for 512 tokens after 2,048 tokens of context and 60 ms after 32,768
# (decision 0199): so much for a token, and for a token and each token of context before it.
_TOKEN_MS = 0.0505
_PAIR_MS = 2.03e-6
# Engines take any size; smaller ones than this spend more on launches than on tokens.
_CHUNK_STEP, _LARGEST_CHUNK = 16, 512


def prefill_chunk(context_tokens: int, ranks: int = 1) -> int:
    """Tokens of a prefill chunk that ends in time, also at the end of a context of this length.

    Larger models and smaller GPUs take longer; a lease may name a smaller chunk. What several GPUs
    gain is left to the larger models that are spread over them.
    """
    most_ms = _CHUNK_MS if ranks == 1 else _CHUNK_TOGETHER_MS
    fits = int(most_ms / (_TOKEN_MS + _PAIR_MS * context_tokens))
    return max(_CHUNK_STEP, min(_LARGEST_CHUNK, fits // _CHUNK_STEP * _CHUNK_STEP))
