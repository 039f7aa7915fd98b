"""A workload whose output lengths spread as far as one likes, from a generator of its own."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from hopon.workload.ask import Ask, Workload

PASS_SECONDS = 1 / 32
"""What a pass takes where every pass takes the same; a power of two, so that sums of passes are exact."""


def mulberry32(seed: int) -> Iterator[float]:
    """Numbers in [0, 1): the generator of that name, 32 bits, by Tommy Ettinger (public domain)."""
    state = seed & 0xFFFFFFFF
    while True:
        state = (state + 0x6D2B79F5) & 0xFFFFFFFF
        mixed = ((state ^ (state >> 15)) * (state | 1)) & 0xFFFFFFFF
        mixed ^= (mixed + ((mixed ^ (mixed >> 7)) * (mixed | 61) & 0xFFFFFFFF)) & 0xFFFFFFFF
        yield ((mixed ^ (mixed >> 14)) & 0xFFFFFFFF) / 2**32


def skewed(
    *,
    count: int = 64,
    skew: float = 0.6,
    seed: int = 265056,
    longest: float = 18.83,
    pass_seconds: float = PASS_SECONDS,
) -> Workload:
    """Outputs of 64 tokens on average without skew; with it most are shorter and 15 % are long.

    Eight requests are there at the beginning, the others follow in gaps of 0 to 8 passes; prompts have 128 to 512
    tokens.

    Args:
        count: requests.
        skew: how far output lengths spread; 0: all the same.
        seed: same seed, same workload.
        longest: how far the longest output exceeds the others.
        pass_seconds: unit of the gaps.

    Raises:
        ValueError: names the value and the limit.
    """
    if count < 1:
        raise ValueError(f"a workload needs at least 1 request, got {count}")
    if not 0 <= skew <= 1:
        raise ValueError(f"the skew must be in [0, 1], got {skew}")
    numbers = mulberry32(seed)
    passes = 0
    asks = []
    for number in range(count):
        gap, prompt, kind, size = (next(numbers) for _ in range(4))
        passes += int(9 * gap) if number >= 8 else 0
        spread = longest * size if kind < 0.15 else -1.6 * size
        output = max(1, floor(64 * (1 + skew * spread) + 0.5))
        asks.append(
            Ask(
                number=number,
                arrival=passes * pass_seconds,
                input_tokens=128 + int(385 * prompt),
                output_tokens=output,
                max_tokens=output,
            )
        )
    return Workload(name=f"skew {skew:g}, seed {seed}", asks=tuple(asks))
