"""A decoder model in float64 numpy: small, slow, and written apart from the package it checks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def rotate_halves(x: Array, inverse: Array, positions: NDArray[np.int64], magnitude: float = 1.0) -> Array:
    """x [tokens, heads, dim]: pairs (i, i + dim / 2) of the first 2 * len(inverse) values turn."""
    half = len(inverse)
    angle = positions[:, None, None] * inverse
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def forward(
    weights: dict[str, Any],
    config: dict[str, Any],
    tokens: list[int],
    inverse: Array | None = None,
    magnitude: float = 1.0,
) -> Array:
    """Logits [tokens, vocab] of a Hugging Face style checkpoint: names and half-split rotation as there."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    eps = config["rms_norm_eps"]
    if inverse is None:
        inverse = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    positions = np.arange(len(tokens))
    x = w["model.embed_tokens.weight"][tokens]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."

        def project(x: Array, name: str, at: str = at) -> Array:
            return np.asarray(x @ w[f"{at}{name}.weight"].T + w.get(f"{at}{name}.bias", np.zeros(1)))

        h = rms(x, w[at + "input_layernorm.weight"], eps)
        q = project(h, "self_attn.q_proj").reshape(-1, heads, dim)
        k = project(h, "self_attn.k_proj").reshape(-1, kv_heads, dim)
        v = project(h, "self_attn.v_proj").reshape(-1, kv_heads, dim)
        if at + "self_attn.q_norm.weight" in w:
            q, k = rms(q, w[at + "self_attn.q_norm.weight"], eps), rms(k, w[at + "self_attn.k_norm.weight"], eps)
        q, k = (rotate_halves(a, inverse, positions, magnitude) for a in (q, k))
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + project(np.einsum("hqk,khd->qhd", scores, v).reshape(len(tokens), -1), "self_attn.o_proj")
        h = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = project(h, "mlp.gate_proj"), project(h, "mlp.up_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.asarray(rms(x, w["model.norm.weight"], eps) @ head.T)


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def random_checkpoint(config: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Seeded float32 weights of a Hugging Face style checkpoint, large enough that logits are not flat."""
    rng = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    family = config["architectures"][0]

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return np.asarray(rng.standard_normal((rows, cols)) / np.sqrt(cols), np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * np.float32(np.sqrt(hidden)),
        "model.norm.weight": gain(hidden),
    }
    if not config.get("tie_word_embeddings", False):
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden) * np.float32(3)
    biased = family.startswith("Qwen2") or config.get("attention_bias", False)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = gain(hidden)
        weights[at + "post_attention_layernorm.weight"] = gain(hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(count * dim, hidden)
            if biased:
                weights[f"{at}self_attn.{name}_proj.bias"] = rng.standard_normal(count * dim).astype(np.float32)
        weights[at + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if config.get("attention_bias", False):
            weights[at + "self_attn.o_proj.bias"] = rng.standard_normal(hidden).astype(np.float32)
        if family.startswith("Qwen3"):
            weights[at + "self_attn.q_norm.weight"] = gain(dim)
            weights[at + "self_attn.k_norm.weight"] = gain(dim)
        weights[at + "mlp.gate_proj.weight"] = matrix(ffn, hidden)
        weights[at + "mlp.up_proj.weight"] = matrix(ffn, hidden)
        weights[at + "mlp.down_proj.weight"] = matrix(hidden, ffn)
    return weights
