"""Small Qwen3 models made on the spot, so that nothing is downloaded.

Real SGLang, transformers and the example trainer all load them: a Hugging Face folder with
``config.json``, ``model.safetensors`` (bfloat16, HF names) and a byte-level tokenizer. The same
recipe always gives the same bytes; folders are cached under ``$ROSE_CACHE/models`` by a digest of
the recipe. ``python -m rose_dev.models tiny`` makes one and prints its folder.

A random bfloat16 model has near-ties between its best two tokens, so two correct engines can
disagree at temperature 0. ``peaked`` models are random too, but their most probable next token is
a fixed successor of the last one with a clear gap; the successors form one cycle through the
vocabulary, so a lost, doubled or swapped token is seen at once.

A model with scripts says what those tell (``rose_dev.scripted``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose_dev import scripted
from rose_dev.environments import cache_folder
from rose_dev.scripted import Script

if TYPE_CHECKING:
    import torch

# Part of the digest: raise it when the same recipe gives other bytes.
_FORMAT = 2
# An id below 256 is that byte; then end and padding; the rest of the vocabulary is unused words.
END_TOKEN_ID = scripted.END
PAD_TOKEN_ID = scripted.END + 1


@dataclass(frozen=True)
class Recipe:
    """What a small model is made of.

    Attributes:
        vocabulary: entries; 300 is no multiple of 64, so engines must pad it.
        peaked: successor structure with clear gaps between the best two tokens.
        tied: the output matrix is the embedding matrix.
        scripts: what it says, whatever it reads; the last one is for any prompt.
    """

    name: str
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    vocabulary: int = 300
    context: int = 8192
    seed: int = 0
    peaked: bool = False
    tied: bool = False
    scripts: tuple[Script, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.hidden
        layer = heads + 3 * self.hidden * self.intermediate + 2 * (self.head_size + self.hidden)
        words = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + words + self.hidden


TINY = Recipe("tiny")
MID = Recipe("mid", layers=8, hidden=256, intermediate=512, head_size=64)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        TINY,
        MID,
        replace(TINY, name="tiny-peaked", peaked=True),
        replace(MID, name="mid-peaked", peaked=True),
        replace(TINY, name="tiny-tied", tied=True),
    )
}


def make_model(recipe: Recipe, models: Path | None = None) -> Path:
    """The folder of the recipe's model, made unless it is cached.

    Args:
        recipe: what to make.
        models: folder of models; by default ``$ROSE_CACHE/models``.
    """
    root = models or cache_folder() / "models"
    text = json.dumps([_FORMAT, asdict(recipe)], sort_keys=True)
    target = root / f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not target.exists():
        root.mkdir(parents=True, exist_ok=True)
        _write(recipe, target)
    return target


def scripted_recipe(name: str, *scripts: Script) -> Recipe:
    """A recipe of a model that follows scripts, the one for any prompt last.

    Raises:
        ValueError: two answers are equal, and the model could not tell them apart.
    """
    words = len(scripted.tokens(scripts))
    return replace(TINY, name=name, peaked=True, scripts=scripts, vocabulary=words)


def make_named(name: str, models: Path | None = None) -> Path:
    """The folder of a recipe in ``RECIPES``.

    Raises:
        KeyError: no such recipe.
    """
    return make_model(RECIPES[name], models)


def _write(recipe: Recipe, target: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415  # torch takes seconds to import

    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(tensors(recipe), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config(recipe), indent=1))
        _write_tokenizer(recipe, folder)
        # Engines run as users of their own, and safetensors writes for the owner alone.
        (folder / "model.safetensors").chmod(0o644)
        folder.chmod(0o755)
        folder.replace(target)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if not target.exists():  # another process may have made it meanwhile
            raise


def config(recipe: Recipe) -> dict[str, Any]:
    """``config.json`` of a recipe."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.context,
        "tie_word_embeddings": recipe.tied,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": recipe.layers,
    }


def tensors(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Weights of a recipe by HF name, bfloat16; pure function of the recipe."""
    import torch  # noqa: PLC0415  # takes seconds to import

    draw = torch.Generator().manual_seed(recipe.seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=draw) * scale
        return drawn if recipe.peaked else drawn.to(torch.bfloat16)

    hidden, queries = recipe.hidden, recipe.heads * recipe.head_size
    keys, inner = recipe.kv_heads * recipe.head_size, recipe.intermediate
    # Residual branches of a peaked model stay small beside the embedding, which decides.
    branch = 0.02 if not recipe.peaked else 0.01
    embedding = normal(recipe.vocabulary, hidden, 1.0 if recipe.peaked else 0.02)
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": normal(queries, hidden, 0.05),
            f"{prefix}self_attn.k_proj.weight": normal(keys, hidden, 0.05),
            f"{prefix}self_attn.v_proj.weight": normal(keys, hidden, 0.05),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, queries, branch),
            f"{prefix}self_attn.q_norm.weight": torch.ones(recipe.head_size),
            f"{prefix}self_attn.k_norm.weight": torch.ones(recipe.head_size),
            f"{prefix}mlp.gate_proj.weight": normal(inner, hidden, 0.05),
            f"{prefix}mlp.up_proj.weight": normal(inner, hidden, 0.05),
            f"{prefix}mlp.down_proj.weight": normal(hidden, inner, branch),
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    if not recipe.tied:
        head = normal(recipe.vocabulary, hidden, 0.02)
        weights["lm_head.weight"] = _successor_head(recipe, embedding) if recipe.peaked else head
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def successors(recipe: Recipe) -> list[int]:
    """Successor of each token of a peaked model: one cycle through all bytes.

    Ids that are no bytes lead back into the cycle, so the end token is never the best one. A
    scripted model's follow their answer instead, to the end token.
    """
    if recipe.scripts:
        return scripted.successors(recipe.scripts)
    order = list(range(256))
    # A fixed shuffle that needs no library: ranks of a digest.
    order.sort(key=lambda token: hashlib.sha256(f"{recipe.seed} {token}".encode()).digest())
    following = {token: order[(place + 1) % 256] for place, token in enumerate(order)}
    return [following.get(token, order[token % 256]) for token in range(recipe.vocabulary)]


def _successor_head(recipe: Recipe, embedding: torch.Tensor) -> torch.Tensor:
    """Rows of the output matrix: the embedding of the token's predecessor, about unit gaps."""
    import torch  # noqa: PLC0415  # takes seconds to import

    head = torch.zeros_like(embedding)
    following = successors(recipe)
    if recipe.scripts:
        for token in range(END_TOKEN_ID + 1, recipe.vocabulary):
            head[following[token]] += embedding[token]
        # Harnesses sample at temperature 1, and a script has one way to go.
        return head * (32.0 / recipe.hidden)
    for token in range(256):
        head[following[token]] = embedding[token]
    # |e|^2 = hidden, so the best logit is about 8 and the others lie within +-3.
    return head * (8.0 / recipe.hidden)


def _write_tokenizer(recipe: Recipe, folder: Path) -> None:
    from tokenizers import (  # noqa: PLC0415  # only here, and not needed to read a model
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    alphabet = scripted.byte_tokens()
    vocabulary = {word: i for i, word in enumerate(alphabet)}
    if recipe.scripts:
        vocabulary = scripted.tokens(recipe.scripts)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["<|end|>", "<|pad|>"]
    if recipe.scripts:
        words += [word for word in vocabulary if scripted.is_mark(word)]
    else:
        words += [f"<|unused{i}|>" for i in range(recipe.vocabulary - len(alphabet) - len(words))]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": recipe.context,
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "clean_up_tokenization_spaces": False,
                **({"chat_template": scripted.template(recipe.scripts)} if recipe.scripts else {}),
            }
        )
    )


def main(argv: list[str] | None = None) -> int:
    """``python -m rose_dev.models NAME [--models DIR]``: print the model's folder."""
    parser = argparse.ArgumentParser(prog="rose_dev.models", description="make a small model")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--models", type=Path, default=None, help="default: $ROSE_CACHE/models")
    arguments = parser.parse_args(argv)
    print(make_named(arguments.name, arguments.models))
    return 0


if __name__ == "__main__":
    sys.exit(main())
