"""Flags of an engine that ``serve``, ``compare`` and ``generate`` have in common."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hopon.core.config import EngineOptions

DEFAULTS = EngineOptions(model="")
"""What counts where neither a flag nor a policy says anything."""


class Delivery(StrEnum):
    """When answers are told."""

    STREAM = "stream"
    BATCH = "batch"


def parse_bytes(text: str) -> int:
    """A number of bytes: ``536870912``, ``512MiB``, ``2GiB``, ``1.5GB``.

    Raises:
        typer.BadParameter: names the text and the units.
    """
    units = {"": 1, "b": 1}
    units |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
    units |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    if parts is None or parts[2] not in units:
        raise typer.BadParameter(f"expected bytes, or a number with KiB, MiB, GiB, KB, MB or GB, got {text!r}")
    return int(float(parts[1]) * units[parts[2]])


def _setting(name: str, text: str, *flags: str) -> Any:
    """A flag that the policy has a word in: not given, its system's value counts, else the general one."""
    default = getattr(DEFAULTS, name)
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return typer.Option(*flags, help=f"{text} (Default: the policy's own, else {shown}.)")


Model = Annotated[
    str, typer.Argument(help="A catalogue name, a .gguf file, a model's folder, or a hub id: org/repo[:file.gguf].")
]
Dtype = Annotated[str, typer.Option(help="Arithmetic of the weights: auto, f32, bf16, q8 or q4.")]
KvCacheDtype = Annotated[str, typer.Option(help="Numbers in the KV cache: auto, f32, f16 or bf16.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0 for one per core.")]
Level = Annotated[str | None, typer.Option(help="Force kernels: amx, avx512, vnni, avx2 or portable (default: best).")]
MaxNumSeqs = Annotated[int | None, _setting("max_num_seqs", "Most sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, _setting("max_num_batched_tokens", "Most tokens that one step computes.")]
LongPrefillTokenThreshold = Annotated[
    int | None, _setting("long_prefill_token_threshold", "Largest chunk of one prompt in a step; 0 for no limit.")
]
BlockSize = Annotated[int | None, _setting("block_size", "Tokens per KV block: 1, 2, 4, 8 or a multiple of 16.")]
NumHostBlocks = Annotated[
    int | None, _setting("num_host_blocks", "KV blocks in a host tier that preempted sequences can be moved to.")
]
EnablePrefixCaching = Annotated[
    bool | None,
    _setting(
        "enable_prefix_caching", "Reuse KV of equal prefixes.", "--enable-prefix-caching/--no-enable-prefix-caching"
    ),
]
EnableChunkedPrefill = Annotated[
    bool | None,
    _setting(
        "enable_chunked_prefill",
        "Spread prompts over steps.",
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output (default: what model and KV cache allow).")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where models and packed weights are kept (default: $HOPON_CACHE or ~/.cache/hopon)."),
]
