"""Writes checkpoints in both formats, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Hugging Face configuration with GQA groups of 3 and sizes that are no multiples of 64."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Any], *, shards: int = 1) -> Path:
    """A Hugging Face folder of float32 (or whatever the arrays are) weights, in one file or several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: value for i, (name, value) in enumerate(weights.items()) if i % shards == shard}
        save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def permute(weight: Any, heads: int) -> Any:
    """Rows of a q or k matrix (or bias) from half-split to adjacent-pair order, as converters of llama models do."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Any],
    *,
    arch: str = "llama",
    matrix_type: str = "F32",
    extra: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    permuted: bool = True,
) -> Path:
    """The same checkpoint as a GGUF file; matrices of ``matrix_type``, vectors float32."""
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(config["eos_token_id"])
    for key, value in (metadata or {}).items():
        full = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        match value:
            case str():
                writer.add_string(full, value)
            case list():
                writer.add_array(full, value)
            case int():
                writer.add_uint32(full, value)
            case _:
                writer.add_float32(full, value)
    for name, weight in weights.items():
        if name in MODEL_NAMES:
            target = MODEL_NAMES[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            stem, _, suffix = rest.rpartition(".")
            target = f"blk.{layer}.{LAYER_NAMES[stem]}.{suffix}"
            if arch == "llama" and permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = permute(weight, heads if stem.endswith("q_proj") else kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(target, np.ascontiguousarray(weight, np.float32))
        else:
            kind = gguf.GGMLQuantizationType[matrix_type]
            writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
