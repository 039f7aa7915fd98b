"""Settings: frozen, validated, never written back. A factory that must decide something returns a new config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Everything the scheduler needs to know, fully resolved.

    Args:
        num_blocks: size of the KV pool in blocks.
        block_size: tokens per block: 1, 2, 4, 8 or a multiple of 16.
        max_model_len: longest prompt plus output, in tokens.
        max_num_seqs: rows; most sequences running at once.
        max_num_batched_tokens: token budget of one step.
        long_prefill_token_threshold: largest chunk of one prompt; 0 means the budget alone limits it.
        enable_prefix_caching: reuse full blocks of equal prefixes.
        enable_chunked_prefill: a prompt may be computed over several steps.
        num_host_blocks: size of the host tier that preempted sequences can be moved to.

    Raises:
        ValueError: names the value and the limit.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 208
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_block_size(self.block_size)
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if self.num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be at least 0, got {self.num_host_blocks}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}: every running sequence takes one token of the budget in every step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_model_len {self.max_model_len}: a whole prompt has to fit into one step"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless the size is one the kernels have: 1, 2, 4, 8 or a multiple of 16."""
    if block_size not in (1, 2, 4, 8) and (block_size < 16 or block_size % 16):
        raise ValueError(f"block_size must be 1, 2, 4, 8 or a multiple of 16, got {block_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What a user may ask of an engine; an executor factory resolves it to a :class:`SchedulerConfig`.

    ``None`` and 0 leave the decision to the factory. ``kv_cache_memory`` is in bytes; it and ``num_kv_blocks``
    exclude each other. ``tokenizer`` is a ``.gguf`` file or a folder with the tokenizer, by default ``model``.
    ``level`` forces an instruction level of the native kernels. ``policy`` names a preset (or ``module:Class``),
    ``policy_knobs`` sets its knobs, ``delivery`` overrides when its answers are told: as tokens come or when the batch
    ends. ``step_records`` is a file for what each step computed and how long it took.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    threads: int = 0
    level: str | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    max_model_len: int | None = None
    num_host_blocks: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 208
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    cache_dir: str | None = None
    policy: str = "hopon"
    policy_knobs: tuple[tuple[str, str], ...] = ()
    delivery: Literal["stream", "batch"] | None = None
    step_records: str | None = None

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("num_kv_blocks and kv_cache_memory exclude each other: give one of them")
        if self.threads < 0:
            raise ValueError(f"threads must be at least 0 (0 = one per core), got {self.threads}")
        if self.delivery not in (None, "stream", "batch"):
            raise ValueError(f"delivery must be 'stream', 'batch' or None, got {self.delivery!r}")
