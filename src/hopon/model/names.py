"""Canonical tensor names, their shapes, and what the two file formats call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hopon.model.config import ModelConfig

Kind = Literal["gguf", "huggingface"]

# canonical -> (GGUF, Hugging Face)
_MODEL = {
    "embed.weight": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm.weight": ("output_norm.weight", "model.norm.weight"),
    "head.weight": ("output.weight", "lm_head.weight"),
}
_LAYER = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "attn.q": ("attn_q", "self_attn.q_proj"),
    "attn.k": ("attn_k", "self_attn.k_proj"),
    "attn.v": ("attn_v", "self_attn.v_proj"),
    "attn.o": ("attn_output", "self_attn.o_proj"),
    "attn.q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "attn.k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    "ffn.gate": ("ffn_gate", "mlp.gate_proj"),
    "ffn.up": ("ffn_up", "mlp.up_proj"),
    "ffn.down": ("ffn_down", "mlp.down_proj"),
}


def file_name(canonical: str, kind: Kind) -> str:
    """What a file of this kind calls a tensor, e.g. "layers.3.attn.q.weight" -> "blk.3.attn_q.weight"."""
    column = 0 if kind == "gguf" else 1
    if canonical in _MODEL:
        return _MODEL[canonical][column]
    _, layer, rest = canonical.split(".", 2)
    name, _, suffix = rest.rpartition(".")
    return f"{('blk', 'model.layers')[column]}.{layer}.{_LAYER[name][column]}.{suffix}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this configuration has, by canonical name."""
    return dict(_expected(config))


def _expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, kv = config.hidden_size, config.ffn_size, config.kv_size
    query = config.num_heads * config.head_dim
    yield "embed.weight", (config.vocab_size, hidden)
    yield "final_norm.weight", (hidden,)
    if not config.tied:
        yield "head.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        yield f"{at}.attn_norm.weight", (hidden,)
        yield f"{at}.ffn_norm.weight", (hidden,)
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{at}.attn.{name}.weight", (rows, hidden)
            if config.qkv_bias:
                yield f"{at}.attn.{name}.bias", (rows,)
        yield f"{at}.attn.o.weight", (hidden, query)
        if config.o_bias:
            yield f"{at}.attn.o.bias", (hidden,)
        if config.qk_norm:
            yield f"{at}.attn.q_norm.weight", (config.head_dim,)
            yield f"{at}.attn.k_norm.weight", (config.head_dim,)
        yield f"{at}.ffn.gate.weight", (ffn, hidden)
        yield f"{at}.ffn.up.weight", (ffn, hidden)
        yield f"{at}.ffn.down.weight", (hidden, ffn)
