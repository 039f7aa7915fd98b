"""Hugging Face ``config.json`` -> ModelConfig. Key names: the transformers library's configuration classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hopon.model.config import ModelConfig
from hopon.model.rope import Rope, RopeScaling, yarn_magnitude
from hopon.model.weights.safetensors import Folder, read_json

# architecture -> family
SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


def folder_config(folder: Folder) -> ModelConfig:
    """The model that a folder describes.

    Raises:
        ValueError: the architecture or a setting is not supported, or a key is missing; names ``config.json``.
    """
    keys = _Keys(folder.config, folder.path / "config.json")
    declared = keys.values.get("architectures") or [f"{str(keys.values.get('model_type')).capitalize()}ForCausalLM"]
    if len(declared) != 1 or declared[0] not in SUPPORTED:
        raise keys.error(f"architecture {', '.join(map(str, declared))} is not supported ({', '.join(SUPPORTED)} are)")
    family = SUPPORTED[declared[0]]
    if keys.values.get("quantization_config"):
        raise keys.error("quantised safetensors (quantization_config) are not supported: use a GGUF or a float folder")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.error(f"hidden_act {keys.values['hidden_act']!r} is not supported (silu is)")
    if keys.values.get("mlp_bias"):
        raise keys.error("mlp_bias true is not supported")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", 128 if family == "qwen3" else hidden // heads)
    biased = bool(keys.values.get("attention_bias"))
    context = keys.integer("max_position_embeddings", 2048 if family == "llama" else 32768)
    rope = _rope(keys, head_dim, context)
    if rope.scaling is not None and rope.scaling.kind != "llama3":  # llama3 configurations give the stretched length
        context = max(context, int(rope.scaling.original_context * rope.scaling.factor))
    if keys.values.get("use_sliding_window", family == "llama"):
        # within the window, attention to all and to the window are the same
        context = min(context, keys.integer("sliding_window", context))
    try:
        return ModelConfig(
            family=family,
            num_layers=keys.integer("num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=keys.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=keys.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=keys.integer("vocab_size"),
            norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope=rope,
            context_length=context,
            tied=bool(keys.values.get("tie_word_embeddings", False)),
            qkv_bias=biased or family == "qwen2",
            o_bias=biased and family != "qwen2",
            qk_norm=family == "qwen3",
            eos_ids=_end_tokens(folder),
            bos_id=_first(keys.values.get("bos_token_id")),
        )
    except ValueError as error:
        raise keys.error(str(error)) from None


def generation_defaults(folder: Folder) -> dict[str, float]:
    """Sampling defaults of ``generation_config.json``: the keys that are there and are numbers."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: folder.generation_config.get(name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


class _Keys:
    """A JSON object with its types checked; null counts as absent."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{key} must be a number, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.error(f"{key} must be a whole number, got {value!r}")
        return int(value)


def _rope(keys: _Keys, head_dim: int, context: int) -> Rope:
    """``rope_theta`` and ``rope_scaling``, or both within ``rope_parameters`` as newer files have it."""
    given = keys.values.get("rope_parameters") or keys.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise keys.error(f"rope_scaling must be an object, got {given!r}")
    inner = _Keys({"rope_theta": keys.values.get("rope_theta")} | given, keys.path)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _SCALINGS:
        raise keys.error(f"rope scaling {kind!r} is not supported ({', '.join(_SCALINGS)} are)")
    share = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    try:
        return Rope(
            theta=inner.number("rope_theta", 10000.0),
            dim=int(head_dim * share),
            scaling=None if kind == "default" else _scaling(kind, inner, context),
        )
    except ValueError as error:
        raise ValueError(str(error) if str(keys.path) in str(error) else f"{keys.path}: {error}") from None


def _scaling(kind: Any, keys: _Keys, context: int) -> RopeScaling:
    original = keys.integer("original_max_position_embeddings", None if kind == "llama3" else context)
    factor = keys.number("factor")
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_context=original,
            low_freq_factor=keys.number("low_freq_factor"),
            high_freq_factor=keys.number("high_freq_factor"),
        )
    if kind != "yarn":
        return RopeScaling(kind=kind, factor=factor, original_context=original)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        attention_factor=_yarn_attention(keys, factor),
        truncate=bool(keys.values.get("truncate", True)),
    )


def _yarn_attention(keys: _Keys, factor: float) -> float | None:
    """The factor that the file states, by itself or as a quotient of two (the DeepSeek form)."""
    if keys.values.get("attention_factor") is not None:
        return keys.number("attention_factor")
    above, below = keys.number("mscale", 0.0), keys.number("mscale_all_dim", 0.0)
    if not (above and below):
        return None
    return yarn_magnitude(factor, above) / yarn_magnitude(factor, below)


def _end_tokens(folder: Folder) -> tuple[int, ...]:
    """The union of what the three files declare."""
    ends: set[int] = set()
    for declared in (folder.config.get("eos_token_id"), folder.generation_config.get("eos_token_id")):
        ends.update(declared if isinstance(declared, list) else () if declared is None else (declared,))
    path = folder.path / "tokenizer_config.json"
    if path.exists():
        tokenizer = read_json(path)
        text = tokenizer.get("eos_token")
        text = text.get("content") if isinstance(text, dict) else text
        for token, entry in (tokenizer.get("added_tokens_decoder") or {}).items():
            if text is not None and entry.get("content") == text:
                ends.add(int(token))
    return tuple(sorted(ends))


def _first(value: Any) -> int | None:
    """A single token id, be it given as a list."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else None
