"""What a model takes of a GPU, from its ``config.json`` and the list of its tensors; no I/O.

A wrong size is worse than none: too small and the engine dies of its neighbour, too large and
nothing is lent. So each kind of cache is sized as SGLang builds it, and what is not known is
refused with the name of the field (``Unsizable``):

| kind | known by | a token costs |
|---|---|---|
| full attention | - | heads x (key + value) of every layer |
| latent (MLA) | ``kv_lora_rank`` and the architecture | rank + rotary part, once a layer |
| hybrid (linear attention, SSM) | the architecture | attention layers; a request has a state |
| sliding window | the architecture | its layers hold ``WINDOW_PERMILLE`` of the tokens |

An engine over several GPUs (*ranks*, tensor parallelism) has a share of the heads on each: at least
one, so that few heads are there twice. Latent caches and what is not split lie on every rank whole.

Sliding windows of other architectures are full attention to SGLang's pools. Multimodal models keep
all this in ``text_config``. ``tests/engines/test_real_sizes.py`` holds the figures to what SGLang
itself makes of the same configurations. Next step: ``memory.EngineSize``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose_core.adapters import STACKS, pool_slots

Config = Mapping[str, Any]

# SGLang's default for ``--swa-full-tokens-ratio``, which ROSE passes so that it is no guess.
WINDOW_PERMILLE = 800
# State slots a running request may need (SGLang: three, or four where its radix cache keeps an
# extra buffer), and as many again as one for prefixes that are kept.
STATE_SLOTS_PER_REQUEST = 5
# Rank buffers of images: SGLang keeps ``SGLANG_VLM_CACHE_SIZE_MB`` out of the KV pool, and
# ``SGLANG_MM_FEATURE_CACHE_MB`` where features travel on the GPU.
IMAGE_BYTES = (100 + 1024) << 20

_KV_BYTES = 2  # bfloat16, the only type the allow-list of engine arguments passes
_ROTARY_BYTES = 4  # tables of sines and cosines are float32
_FP8_BLOCK = 128  # DeepSeek's and Qwen's checkpoints have a scale for each
_VOCABULARY_UNIT = 64  # SGLang pads embeddings to it
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# MLA to SGLang 0.5.23 (``ModelConfig._derive_model_shapes``).
_LATENT = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MistralLarge3ForCausalLM",
        "SarvamMLAForCausalLM",
    }
)
# A second, smaller pool for the layers with a window; all other windows are full to SGLang.
_WINDOWED = frozenset(
    {
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
        "MellumForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
    }
)
_GATED_DELTA = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
_MAMBA = {
    "FalconH1ForCausalLM": "mamba_d_ssm",
    "GraniteMoeHybridForCausalLM": "",
    "NemotronHForCausalLM": "",
}
# Whose head SGLang keeps in float32.
_FLOAT_HEADS = frozenset({"FalconH1ForCausalLM"})
# Fields that mean another cache, or none that is known here.
_FOREIGN = (
    "compress_ratios",
    "conv_L_cache",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "kv_lora_rank",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "ssm_state_size",
    "sparse_attention_config",
    "swa_num_key_value_heads",
)
# Why some of them are refused and not sized.
_REASONS = {
    "compress_ratios": "its cache is compressed by layers",
    "index_topk": "sparse attention keeps an index beside the cache, and SGLang chooses the "
    "type of both by the GPU",
    "sparse_attention_config": "sparse attention keeps an index beside the cache",
}
# What a class of transformers takes for a field that the file leaves out; files on hubs do.
_CLASS_DEFAULTS: Mapping[str, Config] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "qwen3": {"head_dim": 128},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
}
# Whose models repeat their layers on the same weights, with a cache for each round.
_LOOPS = {
    "IQuestLoopCoderForCausalLM": "loop_num",
    "LongcatFlashForCausalLM": "",
    "NanbeigeForCausalLM": "num_loops",
}
# What every rank has whole: latent projections, and the choice of experts.
_WHOLE = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa|gate|router|shared_expert_gate)\.weight")
_WHOLE_EMBEDDINGS = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
_KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.")
_QUANTISED_AS_STORED = frozenset(
    {"awq", "awq_marlin", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "modelopt"}
)


class Unsizable(ValueError):
    """The size cannot be told; the message names the field and what it holds."""


@dataclass(frozen=True)
class CacheShape:
    """What the caches of a model cost, bytes.

    Attributes:
        per_token: of the KV pool, all layers, for one of ``--max-total-tokens``.
        state: of one slot of the state pool; 0 = the model has none.
        windowed: some layers have the smaller pool of sliding windows.
        latent: MLA; its loader keeps a second copy of ``kv_b_proj``.
        image: kept for images whatever the tokens.
        layers: with a KV cache that elastic memory would grow piece by piece.
    """

    per_token: int
    state: int = 0
    windowed: bool = False
    latent: bool = False
    image: int = 0
    layers: int = 0

    def state_slots(self, max_running: int) -> int:
        """State slots for so many requests at a time; SGLang's ``--max-mamba-cache-size``."""
        return max_running * STATE_SLOTS_PER_REQUEST if self.state else 0

    def state_bytes(self, max_running: int) -> int:
        """What does not grow with the tokens; SGLang's pool has one slot for padding."""
        slots = self.state_slots(max_running)
        return self.image + (self.state * (slots + 1) if slots else 0)


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint: its name, safetensors' word for its type, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def cache_shape(config: Config, ranks: int = 1) -> CacheShape:
    """What the caches cost, of a model with this ``config.json``, on each of so many GPUs.

    Raises:
        Unsizable: a field is missing, means a cache that is not known here, or the heads cannot be
            split over so many.
    """
    fields = _Fields.of(config, ranks)
    fields.refuse_uneven_heads()
    name = fields.architecture
    image = IMAGE_BYTES if config.get("vision_config") or config.get("audio_config") else 0
    if name in _GATED_DELTA:
        return _gated_delta(fields, image)
    if name in _MAMBA:
        return _mamba(fields)
    if name in _LATENT:
        return _latent(fields, image)
    if name in _WINDOWED:
        return _windowed(fields, image)
    for field in _FOREIGN:
        fields.refuse_if_set(field)
    fields.refuse_foreign_layers()
    layers = fields.number("num_hidden_layers") * _rounds(fields)
    return CacheShape(layers * _pair(fields), image=image, layers=layers)


def adapter_bytes(
    tensors: Iterable[Stored], rank: int, targets: Collection[str], adapters: int = 1
) -> int:
    """Memory of SGLang's pool for LoRA adapters: two matrices a module, in every slot of the pool.

    A stack of modules has room for each of them as soon as an adapter changes one.
    """
    wide = {part for parts in STACKS.values() if set(parts) & set(targets) for part in parts}
    return sum(
        pool_slots(adapters) * 2 * rank * (tensor.shape[0] + tensor.shape[1])
        for tensor in tensors
        if len(tensor.shape) == 2
        and tensor.name.endswith(".weight")
        and tensor.name.split(".")[-2] in wide
    )


def weight_bytes(config: Config, tensors: Iterable[Stored], ranks: int = 1) -> int:
    """Memory of the weights once SGLang has loaded them, from the tensors of the checkpoint.

    It leaves out what SGLang does not load (a head that is tied to the embeddings, layers for
    speculation) and adds what its loader makes. Of several ranks it is what one of them holds.

    Raises:
        Unsizable: the quantisation is one whose weights are repacked for the GPU.
    """
    fields = _Fields.of(config, ranks)
    quantised = _quantisation(config)
    layers = fields.number("num_hidden_layers")
    tied = bool(config.get("tie_word_embeddings", fields.config.get("tie_word_embeddings")))
    latent = fields.architecture in _LATENT
    total = found = 0
    for tensor in tensors:
        found += 1
        if _is_left_out(tensor.name, layers, tied=tied):
            continue
        size = tensor.count * _width(tensor, quantised=quantised)
        if len(tensor.shape) == 2 and _is_vocabulary(tensor.name):
            size += -tensor.shape[0] % _VOCABULARY_UNIT * tensor.shape[1] * 2
        if fields.architecture in _FLOAT_HEADS and tensor.name == "lm_head.weight":
            size += 2 * tensor.count
        if latent and tensor.name.endswith("kv_b_proj.weight"):
            size += 2 * tensor.count
        total += -(-size * _share_permille(tensor, fields) // 1000)
    if not found:
        raise Unsizable("the model's folder has no safetensors file")
    return total + _rotary_bytes(fields)


def as_block_fp8(config: Config, tensors: Iterable[Stored]) -> tuple[Config, list[Stored]]:
    """The same model as its authors would publish it in FP8: what it would be sized by.

    Projections have a byte for each weight and a float32 scale for each block of 128 by 128;
    embeddings, norms and routers stay as they are.
    """
    stored: list[Stored] = []
    for tensor in tensors:
        if not tensor.name.endswith("_proj.weight") or len(tensor.shape) < 2:
            stored.append(tensor)
            continue
        *experts, rows, columns = tensor.shape
        blocks = (*experts, -(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK))
        stored.append(Stored(tensor.name, "F8_E4M3", tensor.shape))
        stored.append(Stored(f"{tensor.name}_scale_inv", "F32", blocks))
    return {**config, "quantization_config": {"quant_method": "fp8"}}, stored


@dataclass(frozen=True)
class _Fields:
    """The part of a configuration that describes the language model."""

    config: Config
    prefix: str
    architecture: str
    ranks: int = 1

    @classmethod
    def of(cls, config: Config, ranks: int = 1) -> _Fields:
        names = config.get("architectures")
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise Unsizable("architectures is missing: it decides how SGLang keeps its cache")
        thinker = config.get("thinker_config")
        if isinstance(thinker, Mapping):
            inner = cls.of({**thinker, "architectures": names})
            return cls(inner.config, f"thinker_config.{inner.prefix}", str(names[0]), ranks)
        key = next((key for key in _TEXT_CONFIGS if isinstance(config.get(key), Mapping)), "")
        text = config[key] if key else config
        defaults = _CLASS_DEFAULTS.get(str(text.get("model_type")), {})
        given = {name: value for name, value in text.items() if value is not None}
        return cls({**defaults, **given}, f"{key}." if key else "", str(names[0]), ranks)

    def split(self, heads: int) -> int:
        """Heads, groups or channels that one rank has: at least one."""
        return max(1, -(-heads // self.ranks))

    def refuse_uneven_heads(self) -> None:
        """Refuse heads that cannot be split over the ranks: SGLang would not start.

        Raises:
            Unsizable: with both numbers.
        """
        heads = self.config.get("num_attention_heads")
        if isinstance(heads, int) and heads % self.ranks:
            text = f"{self.prefix}num_attention_heads is {heads}, which {self.ranks} GPUs"
            raise Unsizable(f"{text} cannot share evenly")

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there.

        Raises:
            Unsizable: none is, or it is no whole number above zero.
        """
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise Unsizable(f"{self.prefix}{name} is {value!r}, not a number of things")
            return value
        if default is not None:
            return default
        raise Unsizable(f"{self.prefix}{names[0]} is missing")

    def strings(self, name: str) -> list[str]:
        """A list with a word for each layer.

        Raises:
            Unsizable: it is missing.
        """
        value = self.config.get(name)
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise Unsizable(f"{self.prefix}{name} is missing: it says what each layer is")
        return [str(item) for item in value]

    def refuse_if_set(self, name: str) -> None:
        """Refuse a field that means a cache which is not known here.

        Raises:
            Unsizable: the field is set.
        """
        if self.config.get(name):
            text = f"{self.prefix}{name} is set, but how {self.architecture} keeps its cache"
            why = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise Unsizable(f"{text} is not known{why}")

    def refuse_foreign_layers(self) -> None:
        """Refuse layers that are no attention.

        Raises:
            Unsizable: names the kind.
        """
        kinds = self.config.get("layer_types") or ()
        known = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
        odd = sorted({str(kind) for kind in kinds} - known)
        if odd:
            text = f"{self.prefix}layer_types has {odd[0]!r}, but how {self.architecture} keeps"
            raise Unsizable(f"{text} its cache is not known")


def _head(fields: _Fields) -> int:
    default = 0
    if fields.config.get("head_dim") is None:
        default = fields.number("hidden_size") // max(1, fields.number("num_attention_heads"))
    return fields.number("head_dim", default=default)


def _kv_heads(fields: _Fields) -> int:
    if fields.config.get("multi_query"):
        return 1
    return fields.number(
        *("n_head_kv", "num_kv_heads", "num_key_value_heads"),
        *("multi_query_group_num", "num_attention_groups", "num_attention_heads"),
    )


def _pair(fields: _Fields) -> int:
    """Bytes of a token's keys and values in one layer."""
    head = _head(fields)
    width = head + (fields.number("v_head_dim", default=0) or head)
    return fields.split(_kv_heads(fields)) * width * _KV_BYTES


def _rounds(fields: _Fields) -> int:
    field = _LOOPS.get(fields.architecture)
    if field is None:
        return 1
    return fields.number(field, default=1) if field else 2


def _latent(fields: _Fields, image: int) -> CacheShape:
    fields.refuse_if_set("index_topk")
    layers = fields.number("num_hidden_layers", "num_layers") * _rounds(fields)
    state, prefix = 0, fields.prefix
    if fields.architecture == "KimiLinearForCausalLM":
        linear = fields.config.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise Unsizable(f"{prefix}linear_attn_config is missing")
        inner = _Fields(linear, f"{prefix}linear_attn_config.", fields.architecture)
        kda = linear.get("kda_layers") or ()
        heads, head = fields.split(inner.number("num_heads")), inner.number("head_dim")
        # One convolution over queries, keys and values (bfloat16), one matrix a head (float32).
        convolution = 3 * heads * head * (inner.number("short_conv_kernel_size") - 1) * 2
        state = len(kda) * (convolution + heads * head * head * 4)
        layers -= len(kda)
    width = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    per_token = layers * width * _KV_BYTES
    return CacheShape(per_token, state, latent=True, image=image, layers=layers)


def _gated_delta(fields: _Fields, image: int) -> CacheShape:
    layers = fields.number("num_hidden_layers")
    every = fields.number("full_attention_interval", default=4)
    full = layers // max(1, every)
    keys, values = (
        fields.split(fields.number(f"linear_num_{kind}_heads"))
        * fields.number(f"linear_{kind}_head_dim")
        for kind in ("key", "value")
    )
    convolution = (2 * keys + values) * (fields.number("linear_conv_kernel_dim") - 1) * 2
    matrix = values * fields.number("linear_key_head_dim") * _state_width(fields)
    state = (layers - full) * (convolution + matrix)
    return CacheShape(full * _pair(fields), state, image=image, layers=full)


def _state_width(fields: _Fields) -> int:
    return 2 if fields.config.get("mamba_ssm_dtype") in {"bfloat16", "float16"} else 4


def _mamba(fields: _Fields) -> CacheShape:
    name = fields.architecture
    if name == "NemotronHForCausalLM":
        pattern = fields.config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern:
            raise Unsizable(f"{fields.prefix}hybrid_override_pattern is missing")
        linear, full = pattern.count("M"), pattern.count("*")
        heads, head = fields.number("mamba_num_heads"), fields.number("mamba_head_dim")
        groups, size = fields.number("n_groups"), fields.number("ssm_state_size")
        kernel = fields.number("conv_kernel")
    else:
        if name == "FalconH1ForCausalLM":
            linear = full = fields.number("num_hidden_layers")
        else:
            kinds = fields.strings("layer_types")
            linear, full = kinds.count("mamba"), kinds.count("attention")
        heads, head = fields.number("mamba_n_heads"), fields.number("mamba_d_head")
        groups, size = fields.number("mamba_n_groups"), fields.number("mamba_d_state")
        kernel = fields.number("mamba_d_conv")
    inner = fields.split(heads) * head
    convolution = (inner + 2 * fields.split(groups) * size) * (kernel - 1) * 2
    state = linear * (convolution + inner * size * _state_width(fields))
    return CacheShape(full * _pair(fields), state, layers=full)


def _windowed(fields: _Fields, image: int) -> CacheShape:
    layers = fields.number("num_hidden_layers")
    if fields.architecture == "Llama4ForConditionalGeneration":
        full = layers // 4
        window = layers - full
    elif fields.architecture.startswith("MiMoV2"):
        pattern = fields.strings("hybrid_layer_pattern")[:layers]
        window, full = pattern.count("1"), pattern.count("0")
    else:
        kinds = fields.strings("layer_types")[:layers]
        window, full = kinds.count("sliding_attention"), kinds.count("full_attention")
    plain, head = _pair(fields), _head(fields)
    heads = fields.split(fields.number("swa_num_key_value_heads", default=_kv_heads(fields)))
    key = fields.number("swa_head_dim", default=head)
    values = fields.number("swa_v_head_dim", default=key)
    narrow = heads * (key + values) * _KV_BYTES
    per_token = full * plain + -(-window * narrow * WINDOW_PERMILLE // 1000)
    if not full:
        per_token = window * narrow
    return CacheShape(per_token, windowed=bool(window), image=image, layers=layers)


def _quantisation(config: Config) -> bool:
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return False
    method = str(found.get("quant_method", "")).lower()
    if method not in _QUANTISED_AS_STORED:
        known = ", ".join(sorted(_QUANTISED_AS_STORED))
        text = f"quantization_config.quant_method is {method!r}, whose weights SGLang repacks as"
        raise Unsizable(f"{text} the GPU wants; known are: {known}")
    return True


def _is_left_out(name: str, layers: int, *, tied: bool) -> bool:
    if name.endswith("rotary_emb.inv_freq") or name.startswith(("mtp.", "model.mtp.")):
        return True
    if tied and name.endswith("lm_head.weight"):
        return True
    # DeepSeek and GLM keep the layers for speculation behind the last one.
    head, found, rest = name.partition("layers.")
    number = rest.split(".", 1)[0]
    return bool(found) and head in {"model.", ""} and number.isdigit() and int(number) >= layers


def _share_permille(tensor: Stored, fields: _Fields) -> int:
    """What one rank holds of a tensor."""
    if fields.ranks == 1 or len(tensor.shape) < 2 or _WHOLE.search(tensor.name):
        return 1000
    if _is_vocabulary(tensor.name) and fields.architecture in _WHOLE_EMBEDDINGS:
        return 1000
    if _KEYS_AND_VALUES.search(tensor.name):
        heads = _kv_heads(fields)
        return -(-1000 * fields.split(heads) // heads)
    return -(-1000 // fields.ranks)


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "word_embeddings.weight"))


_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def _width(tensor: Stored, *, quantised: bool) -> int:
    """Bytes of an element once loaded: the model computes in 16 bits, scales stay as they are."""
    width = _WIDTHS.get(tensor.dtype, 1)
    if not tensor.dtype.startswith("F") or width <= 2:
        return width
    kept = quantised and tensor.name.endswith(("_scale", "_scale_inv", ".scales"))
    return width if kept or len(tensor.shape) < 2 else 2


def _rotary_bytes(fields: _Fields) -> int:
    """Tables of sines and cosines, one for the whole model."""
    positions = fields.number("max_position_embeddings", "model_max_length", default=0)
    part = fields.config.get("qk_rope_head_dim")
    if not isinstance(part, int):
        rope = fields.config.get("rope_parameters") or {}
        share = fields.config.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
        part = int(_head(fields) * (share if isinstance(share, int | float) else 1.0))
    return positions * part * _ROTARY_BYTES
