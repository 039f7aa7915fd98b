"""How near a run came to what the machine can do: operations per second, or bytes per second, over a measured peak.

The ceiling of W1, W3 and W4 is arithmetic, that of W2 memory; W5 mixes both and has none. Linear layers are counted,
attention and what is read of the KV cache are not: a fraction is what the machine was used for at least.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.measure import Run
from hopon.model.config import ModelConfig

ARITHMETIC = {"f32": "f32", "bf16": "bf16", "i8": "int8", "i4": "int8"}
"""Peak of the kernels by how a weight is stored: 4-bit codes are multiplied as 8-bit ones."""


def ceiling(workload: str, dtype: str) -> str | None:
    """Name of the peak that bounds a workload: of ``benchmarks.peaks``; None where there is none.

    Args:
        workload: W1 to W5.
        dtype: of the layers and the head, as a hopon tells it, for example "i4 (head i8)". Weights of more than one
            arithmetic have no one peak.
    """
    if workload == "W2":
        return "read"
    if workload not in ("W1", "W3", "W4"):
        return None
    kinds = {ARITHMETIC[kind] for part in dtype.split(" (head ") for kind in part.rstrip(")").split("+")}
    return kinds.pop() if len(kinds) == 1 else None


def operations(config: ModelConfig, run: Run) -> int:
    """Multiplications and additions of the linear layers in a run: two per weight and token.

    Tokens from the prefix cache are not computed, nor is the last one of an answer; the head is for sampled ones
    only, and so is what lies behind the last attention.
    """
    head = config.vocab_size * config.hidden_size
    layers = config.num_parameters - head * (1 if config.tied else 2)
    computed = run.prompt_tokens - run.cached_tokens + run.output_tokens - run.num_requests
    behind = config.hidden_size * (config.num_heads * config.head_dim + 3 * config.ffn_size)
    return 2 * (layers * computed - behind * (computed - run.output_tokens) + head * run.output_tokens)


def fraction(run: Run, peak: str, peaks: Mapping[str, float], config: ModelConfig, weight_bytes: int) -> float | None:
    """Share of a peak that a run reached, in [0, 1] unless caches hold the weights; None if it was not measured.

    Against ``read``, every output token reads all weights once: the first one with the prompt, the others alone.
    """
    if peak not in peaks:
        return None
    work = weight_bytes * run.output_tokens if peak == "read" else operations(config, run)
    return work / run.seconds / peaks[peak]
