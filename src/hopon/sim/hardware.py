"""Machines and models as numbers, for the roofline: peak rates, memory, and what a token weighs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device.

    Args:
        flops: peak dense multiply-adds of 16-bit numbers, counted as two operations, per second.
        bandwidth: memory bandwidth, bytes per second.
        memory: bytes.
        host_bandwidth: to or from host memory, one way, bytes per second.
        source: where the numbers come from.
        flops_efficiency: share of the peak that large matrix products reach.
        bandwidth_efficiency: share of the bandwidth that reading weights and keys reaches.
        host_efficiency: share of the host link that block copies reach.
        overhead: seconds of a pass that are no work on the device: launches, Python, sampling.
        captured_overhead: the same for a pass that was captured beforehand, as a CUDA graph is.
    """

    flops: float
    bandwidth: float
    memory: float
    host_bandwidth: float
    source: str
    flops_efficiency: float = 0.66
    bandwidth_efficiency: float = 0.70
    host_efficiency: float = 0.8
    overhead: float = 3e-3
    captured_overhead: float = 0.5e-3


HARDWARE: Mapping[str, Hardware] = {
    "a100-40": Hardware(
        flops=312e12,
        bandwidth=1555e9,
        memory=40e9,
        host_bandwidth=32e9,
        source="NVIDIA A100 datasheet, SXM 40 GB: 312 TFLOP/s bf16, 1,555 GB/s, PCIe 4.0 x16",
    ),
    "a100-80": Hardware(
        flops=312e12,
        bandwidth=2039e9,
        memory=80e9,
        host_bandwidth=32e9,
        source="NVIDIA A100 datasheet, SXM 80 GB: 312 TFLOP/s bf16, 2,039 GB/s, PCIe 4.0 x16",
    ),
    "h100": Hardware(
        flops=989.4e12,
        bandwidth=3350e9,
        memory=80e9,
        host_bandwidth=64e9,
        source="NVIDIA H100 datasheet, SXM 80 GB: 989.4 TFLOP/s bf16 dense, 3.35 TB/s, PCIe 5.0 x16",
    ),
    "h200": Hardware(
        flops=989.4e12,
        bandwidth=4800e9,
        memory=141e9,
        host_bandwidth=64e9,
        source="NVIDIA H200 datasheet, SXM 141 GB: 989.4 TFLOP/s bf16 dense, 4.8 TB/s, PCIe 5.0 x16",
    ),
    "l4": Hardware(
        flops=121e12,
        bandwidth=300e9,
        memory=24e9,
        host_bandwidth=32e9,
        source="NVIDIA L4 datasheet, 24 GB: 121 TFLOP/s bf16 dense, 300 GB/s, PCIe 4.0 x16",
    ),
    "cpu-2": Hardware(
        flops=933e9,
        bandwidth=52e9,
        memory=16e9,
        host_bandwidth=46e9,
        source="measured on two cores of a server with AVX-512 BF16: bf16 products of 512 rows, a loop that reads "
        "memory; the host link is a copy within memory",
        flops_efficiency=0.9,
        bandwidth_efficiency=0.9,
        host_efficiency=1.0,
        overhead=0.3e-3,
        captured_overhead=0.3e-3,
    ),
}
"""By name. Efficiencies of the GPUs: Vidur's published profiles of linear layers give 9.7 ms for one token and 0.067 ms
for each further one beyond the knee (Llama-3-8B, A100-80: 70 % of bandwidth, 66 % of peak), 5.6 and 0.020 ms for
Llama-2-7B on H100 (69 %, 65 %). The overhead is about what DistServe's published fits of decode passes (OPT-13B,
A100-80: 19.9 and 23.5 ms) leave above the time of reading the weights; the captured one is an assumption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A dense decoder as numbers.

    Args:
        num_layers: transformer layers.
        hidden: width.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate: width of the feed-forward part.
        gated: three matrices in the feed-forward part instead of two.
        vocab_size: rows of the head.
        max_model_len: longest context.
        dtype_bytes: bytes of a weight and of a number in the KV cache.
        tied: the head is the embedding.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool
    vocab_size: int
    max_model_len: int
    dtype_bytes: int = 2
    tied: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name not in ("gated", "tied") and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Numbers in the head."""
        return self.hidden * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """All that lies in memory: layers, embedding and head."""
        return (self.layer_weights + (2 - self.tied) * self.head_weights) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> Model:
        """From a Hugging Face ``config.json``.

        Raises:
            ValueError: names the file and the field.
        """
        config = config.get("text_config", config)
        if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
            raise ValueError(f"{name}: mixtures of experts are not modelled")
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            intermediate = config.get("intermediate_size") or config["ffn_dim"]
            return cls(
                num_layers=config["num_hidden_layers"],
                hidden=hidden,
                num_heads=heads,
                num_kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                intermediate=intermediate,
                gated=config.get("hidden_act", "silu") == "silu" and "ffn_dim" not in config,
                vocab_size=config["vocab_size"],
                max_model_len=config["max_position_embeddings"],
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ValueError(f"{name}: no field {error.args[0]!r} in it") from error


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, length: int, tied: bool = False
) -> Model:
    return Model(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=inner,
        gated=True,
        vocab_size=vocab,
        max_model_len=length,
        tied=tied,
    )


MODELS: Mapping[str, Model] = {
    "llama-3-8b": _dense(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3.1-8b": _dense(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-2-7b": _dense(32, 4096, 32, 32, 11008, 32000, 4096),
    "mistral-7b": _dense(32, 4096, 32, 8, 14336, 32000, 32768),
    "qwen2.5-0.5b": _dense(24, 896, 14, 2, 4864, 151936, 32768, tied=True),
    "smollm2-135m": _dense(30, 576, 9, 3, 1536, 49152, 8192, tied=True),
    "opt-13b": Model(
        num_layers=40,
        hidden=5120,
        num_heads=40,
        num_kv_heads=40,
        head_dim=128,
        intermediate=20480,
        gated=False,
        vocab_size=50272,
        max_model_len=2048,
        tied=True,
    ),
}
"""By name, from the models' published configurations."""


def model(name: str) -> Model:
    """A built-in model by name, or the one of a Hugging Face ``config.json`` (the file or its folder).

    Raises:
        ValueError: unknown; lists the names. Or the file lacks a field.
        OSError: the file cannot be read.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json":
        raise ValueError(f"unknown model {name!r}; known: {', '.join(MODELS)}, or the path of a config.json")
    try:
        return Model.parse(json.loads(path.read_text(encoding="utf-8")), str(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def hardware(name: str) -> Hardware:
    """A row of the table. Raises ValueError for an unknown name; lists the names."""
    if name not in HARDWARE:
        raise ValueError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}")
    return HARDWARE[name]
