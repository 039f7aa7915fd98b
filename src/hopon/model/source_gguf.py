"""GGUF metadata -> ModelConfig. Key names: the GGUF specification (MIT, ggml-org). Knows metadata only."""

from __future__ import annotations

from typing import Any

from hopon.model.config import ModelConfig
from hopon.model.rope import Rope, RopeScaling
from hopon.model.weights.gguf import GGUF

SUPPORTED = ("llama", "qwen2", "qwen3")
_END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>")
_CONTROL = 3  # tokenizer.ggml.token_type of a control token


def gguf_config(file: GGUF) -> ModelConfig:
    """The model that a file describes.

    Raises:
        ValueError: the architecture or a setting is not supported, or metadata is missing; names the file.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in SUPPORTED:
        raise ValueError(f"{file.path}: architecture {arch!r} is not supported ({', '.join(SUPPORTED)} are)")
    keys = _Keys(file, arch)
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    if keys.number("expert_count", 0):
        raise ValueError(f"{file.path}: mixtures of experts are not supported")
    if file.metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file.path}: one of {file.metadata['split.count']} parts of a split model: join them first")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: keys of {head_dim} and values of another length are not supported")
    context = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", context) or context
    try:
        return ModelConfig(
            family=arch,
            num_layers=keys.integer("block_count"),
            hidden_size=hidden,
            ffn_size=keys.integer("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(file, keys, head_dim, context),
            context_length=min(context, window),  # within the window, attention to all and to the window are the same
            tied="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            qk_norm=arch == "qwen3",
            eos_ids=_end_tokens(file),
            bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            add_bos=file.metadata.get("tokenizer.ggml.add_bos_token"),
        )
    except ValueError as error:
        raise ValueError(str(error) if str(file.path) in str(error) else f"{file.path}: {error}") from None


class _Keys:
    """Metadata under the architecture's prefix, with types checked."""

    def __init__(self, file: GGUF, arch: str) -> None:
        self._file, self.arch = file, arch

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self._file.path}: metadata {self.arch}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self._file.path}: metadata {self.arch}.{key} must be one number, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise ValueError(f"{self._file.path}: metadata {self.arch}.{key} must be a whole number, got {value!r}")
        return int(value)


def _rope(file: GGUF, keys: _Keys, head_dim: int, context: int) -> Rope:
    divisors: tuple[float, ...] = ()
    scaling = None
    kind: Any = keys.get("rope.scaling.type") or ("linear" if keys.get("rope.scale_linear") else "none")
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.float32("rope_freqs.weight").tolist())
        if kind != "none":
            raise ValueError(f"{file.path}: rope_freqs.weight together with {kind!r} rope scaling is not supported")
    elif kind in ("linear", "yarn"):
        if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise ValueError(
                f"{file.path}: rope.scaling.attn_factor {keys.get('rope.scaling.attn_factor')} is not supported"
            )
        scaling = RopeScaling(
            kind=kind,
            factor=keys.number("rope.scaling.factor", keys.get("rope.scale_linear")),
            original_context=keys.integer("rope.scaling.original_context_length", context),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    elif kind != "none":
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported (none, linear and yarn are)")
    return Rope(
        theta=keys.number("rope.freq_base", 10000.0),
        dim=keys.integer("rope.dimension_count", head_dim),
        interleaved=keys.arch == "llama",  # the converter permutes q and k of this architecture alone
        scaling=scaling,
        divisors=divisors,
    )


def _end_tokens(file: GGUF) -> tuple[int, ...]:
    """Declared end tokens, and control tokens whose text ends a text or a turn in the common vocabularies."""
    meta = file.metadata
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {int(meta[f"tokenizer.ggml.{name}"]) for name in names if f"tokenizer.ggml.{name}" in meta}
    texts, kinds = meta.get("tokenizer.ggml.tokens", []), meta.get("tokenizer.ggml.token_type", [])
    controls = [index for index, kind in enumerate(kinds) if kind == _CONTROL and index < len(texts)]
    return tuple(sorted(ends | {index for index in controls if texts[index] in _END_TEXTS}))
