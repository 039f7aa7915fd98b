"""How large the KV cache becomes, and its memory. Knows bytes and tokens, not what is in a block."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hopon.core.config import EngineOptions
from hopon.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KvSize:
    """Size of the pool.

    Args:
        num_blocks: blocks that requests can use.
        block_bytes: K and V of one block, all layers.
        block_size: tokens per block.
        max_model_len: longest request, at most what the pool holds.
        notice: what was lowered and why; empty when nothing was.
    """

    num_blocks: int
    block_bytes: int
    block_size: int
    max_model_len: int
    notice: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def num_full_requests(self) -> float:
        """Requests of the greatest length that fit at once."""
        return self.num_tokens / self.max_model_len


def block_bytes(config: ModelConfig, block_size: int, item_size: int) -> int:
    """Bytes of one block: K and V of every layer and head for ``block_size`` tokens."""
    return 2 * config.num_layers * config.kv_size * block_size * item_size


def size_kv(config: ModelConfig, options: EngineOptions, *, item_size: int, available: int, fixed: int) -> KvSize:
    """Decide on the pool before anything is loaded.

    By itself it takes half of what ``available`` bytes leave after ``fixed`` (weights, buffers), and no more than
    ``max_num_seqs`` requests of the greatest length can use. ``num_kv_blocks`` and ``kv_cache_memory`` set the size. A
    ``max_model_len`` that was not asked for is lowered to what the pool holds.

    Args:
        config: the model.
        options: what the user asked for.
        item_size: bytes of a number in the cache.
        available: bytes that the process may still take.
        fixed: bytes that weights and buffers will take of them.

    Raises:
        ValueError: the length asked for is beyond the model's or does not fit (with the largest that does), or the
            memory does not hold what was asked for (with the numbers).
    """
    size, per_block = options.block_size, block_bytes(config, options.block_size, item_size)
    asked = options.max_model_len
    if asked is not None and not 1 <= asked <= config.context_length:
        raise ValueError(f"max_model_len must be in [1, {config.context_length}], the model's context, got {asked}")
    length = asked or config.context_length
    enough = options.max_num_seqs * -(-length // size)
    left = available - fixed
    if left < per_block:
        raise ValueError(
            f"not enough memory: weights and buffers take {_mib(fixed)} and one KV block {_mib(per_block)}, "
            f"but {_mib(available)} are available"
        )
    if options.num_kv_blocks is not None:
        blocks, origin = options.num_kv_blocks, f"num_kv_blocks {options.num_kv_blocks}"
    elif options.kv_cache_memory is not None:
        blocks, origin = options.kv_cache_memory // per_block, f"kv_cache_memory {_mib(options.kv_cache_memory)}"
        blocks = min(blocks, enough)
    else:
        blocks, origin = min(enough, left // 2 // per_block), f"half of the {_mib(left)} that weights leave"
    if blocks < 1:
        raise ValueError(f"{origin} does not hold one KV block of {size} tokens, which takes {per_block} bytes")
    if blocks * per_block > left:
        raise ValueError(
            f"not enough memory: weights and buffers take {_mib(fixed)} and the KV cache ({origin}) "
            f"{_mib(blocks * per_block)}, but {_mib(available)} are available"
        )
    fits = blocks * size
    if asked is not None and asked > fits:
        raise ValueError(
            f"max_model_len {asked} does not fit into the KV cache: {origin} holds {fits} tokens. Use a max_model_len "
            f"of at most {fits}, or a KV cache of at least {-(-asked // size) * per_block} bytes"
        )
    notice = ""
    if length > fits:
        notice = f"max_model_len lowered from the model's {length} to {fits}: {origin} holds no more tokens"
    return KvSize(
        num_blocks=blocks, block_bytes=per_block, block_size=size, max_model_len=min(length, fits), notice=notice
    )


def anonymous(num_bytes: int, *, huge: bool = False) -> NDArray[np.uint8]:
    """Zeroed private memory at a page border; it counts only once it is written.

    ``huge`` asks for huge pages: fewer address look-ups for memory that is read as a whole, step by step.

    Raises:
        OSError: the system refuses that much address space.
    """
    area = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes} bytes"
