"""Qwen3: llama with an RMSNorm on every q and k head before the rotation.

Source: "Qwen3 Technical Report" (Yang et al. 2025).
"""

from __future__ import annotations

from hopon.model.config import ModelConfig
from hopon.model.program import Builder, Program


def build(config: ModelConfig) -> Program:
    """The program of a qwen3 model."""
    hidden, ffn, eps = config.hidden_size, config.ffn_size, config.norm_eps
    query = config.num_heads * config.head_dim
    p = Builder()
    p.embed("residual", "embed", hidden)
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        p.norm("residual", "normed", f"{at}.attn_norm", hidden, eps)
        qkv = (f"{at}.attn.q", f"{at}.attn.k", f"{at}.attn.v")
        p.linear("normed", "qkv", qkv, query + 2 * config.kv_size, biased=config.qkv_bias)
        p.rope_kv("qkv", layer, q_norm=f"{at}.attn.q_norm", k_norm=f"{at}.attn.k_norm", eps=eps)
        p.attention("qkv", "attended", layer, query)
        if layer == config.num_layers - 1:
            p.select("attended", "residual")
        p.add_linear("attended", "residual", f"{at}.attn.o", hidden, biased=config.o_bias)
        p.norm("residual", "normed", f"{at}.ffn_norm", hidden, eps)
        p.linear("normed", "gate_up", (f"{at}.ffn.gate", f"{at}.ffn.up"), 2 * ffn)
        p.gate("gate_up", "gated", ffn)
        p.add_linear("gated", "residual", f"{at}.ffn.down", hidden)
    p.norm("residual", "residual", "final_norm", hidden, eps)
    p.head("residual", "logits", "embed" if config.tied else "head", config.vocab_size)
    return p.build()
