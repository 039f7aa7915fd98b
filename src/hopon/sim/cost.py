"""How long a step takes: models of a device, from what the step computes. They know no scheduler and no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hopon.sim.hardware import Hardware, Model
from hopon.tracing import StepFeatures


class Cost(Protocol):
    """A device as a function."""

    def seconds(self, step: StepFeatures) -> float:
        """How long a step takes. 0 for one that computes and moves nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """Another device in a good or a bad minute: every step takes ``factor`` times as long."""

    cost: Cost
    factor: float

    def seconds(self, step: StepFeatures) -> float:
        """See :class:`Cost`."""
        return self.factor * self.cost.seconds(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What moving a block costs, beside whatever is computed: copies run before the step, one after another.

    Args:
        block_bytes: keys and values of one block.
        host_bandwidth: to or from the host, bytes per second.
        copy_bandwidth: within the device (reads and writes), bytes per second.
    """

    block_bytes: float
    host_bandwidth: float
    copy_bandwidth: float

    def seconds(self, step: StepFeatures) -> float:
        """Of all moves of a step."""
        if not (step.moved_blocks or step.copied_blocks):
            return 0.0
        moved = step.moved_blocks * self.block_bytes / self.host_bandwidth
        return moved + step.copied_blocks * 2 * self.block_bytes / self.copy_bandwidth


NO_LINK = Link(block_bytes=0.0, host_bandwidth=1.0, copy_bandwidth=1.0)
"""Moves cost nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A constant, so much per sequence and so much per prompt token.

    The defaults are those of the article this project began with: 22 ms, 0.35 ms for each sequence, 60 ms for 1,000
    prompt tokens. Padding of a decode pass counts as sequences, of a pass with prefill as prompt tokens.
    """

    base: float = 0.022
    per_sequence: float = 0.00035
    per_prompt_token: float = 0.00006
    link: Link = NO_LINK

    def seconds(self, step: StepFeatures) -> float:
        """See the class."""
        moves = self.link.seconds(step)
        if not step.computes:
            return moves
        work = self.base + self.per_sequence * step.num_seqs + self.per_prompt_token * step.num_prompt_tokens
        return work + moves


@dataclass(frozen=True, kw_only=True, slots=True)
class DistServe:
    """OPT-13B on one A100-80, as DistServe's repository publishes its fits (milliseconds there, seconds here).

    Prefill 18.1 + 0.1019 per token + 7.1e-6 per squared length; decode 19.9 + 0.00063 per context token + 0.0385 per
    sequence. The two were fitted to passes of one kind each. A mixed pass is taken as the prefill plus what the decodes
    add above their constant, which is our assumption.

    Args:
        prefill_base: constant of a pass with prefill.
        per_prompt_token: of prefill.
        per_square: per prompt token squared; for a chunk, per pair of a token and a key, twice.
        decode_base: constant of a pass without prefill.
        per_context_token: of decoding.
        per_sequence: of decoding.
        link: moves.
    """

    prefill_base: float = 0.0181
    per_prompt_token: float = 0.0001019
    per_square: float = 7.1e-9
    decode_base: float = 0.0199
    per_context_token: float = 0.63e-6
    per_sequence: float = 0.0385e-3
    link: Link = NO_LINK

    def seconds(self, step: StepFeatures) -> float:
        """See the class."""
        moves = self.link.seconds(step)
        if not step.computes:
            return moves
        decodes = self.per_context_token * step.decode_context
        if not step.prefill_tokens:
            return self.decode_base + decodes + self.per_sequence * step.num_seqs + moves
        prompts = self.per_prompt_token * step.num_prompt_tokens + self.per_square * 2 * step.prefill_work
        return self.prefill_base + prompts + decodes + self.per_sequence * step.num_decodes + moves


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rates:
    """Seconds, from a model and a machine."""

    compute_row: float  # of all layers, for one token
    read_layers: float
    compute_logits: float  # of the head, for one row
    read_head: float
    compute_pair: float  # a token attending to a key, in all layers
    read_key: float

    @classmethod
    def of(cls, model: Model, hardware: Hardware) -> _Rates:
        flops = hardware.flops * hardware.flops_efficiency
        bandwidth = hardware.bandwidth * hardware.bandwidth_efficiency
        return cls(
            compute_row=2 * model.layer_weights / flops,
            read_layers=model.layer_weights * model.dtype_bytes / bandwidth,
            compute_logits=2 * model.head_weights / flops,
            read_head=model.head_weights * model.dtype_bytes / bandwidth,
            compute_pair=4 * model.num_layers * model.num_heads * model.head_dim / flops,
            read_key=model.kv_bytes_per_token / bandwidth,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Each part takes the longer of computing and reading: matrices once per pass, keys and values per sequence.

    Optional captured batch sizes: a pass without prefill and with at most the largest of them runs as the next size up
    (the rows in between are computed in vain) and pays the smaller overhead, as passes captured as CUDA graphs do.

    Args:
        model: what is computed.
        hardware: on what.
        captured: batch sizes, rising.
        link: moves.
    """

    model: Model
    hardware: Hardware
    captured: tuple[int, ...] = ()
    link: Link = NO_LINK
    _rates: _Rates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rates", _Rates.of(self.model, self.hardware))
        if any(size < 1 for size in self.captured) or list(self.captured) != sorted(set(self.captured)):
            raise ValueError(f"captured batch sizes must rise from at least 1, got {self.captured}")

    def seconds(self, step: StepFeatures) -> float:
        """See the class."""
        moves = self.link.seconds(step)
        if not step.computes:
            return moves
        rates = self._rates
        rows, logits = step.num_tokens, step.num_logits
        overhead = self.hardware.overhead
        if self.captured and not step.prefill_tokens and rows <= self.captured[-1]:
            rows = self.captured[bisect_left(self.captured, rows)]
            logits = rows
            overhead = self.hardware.captured_overhead
        linear = max(rates.compute_row * rows, rates.read_layers)
        if logits:
            linear += max(rates.compute_logits * logits, rates.read_head)
        decodes = max(rates.compute_pair, rates.read_key) * step.decode_context
        return overhead + linear + decodes + rates.compute_pair * step.prefill_work + moves


def pieces(tokens: int, knots: Sequence[int]) -> list[int]:
    """How many of the tokens lie between each knot and the next one, or behind the last."""
    return [max(0, min(tokens, end) - start) for start, end in zip(knots, [*knots[1:], tokens], strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """f(T) + c (decode context) + d (prefill work) + e (sequences), for T tokens in the pass.

    f is ``base`` at 0 tokens and piecewise linear: from knot i to the next, or for good, it rises by ``slopes[i]``
    seconds per token. Few tokens are bound by reading weights, many by computing, and kernels change in between. See
    :func:`hopon.sim.calibrate.fit`.
    """

    base: float
    knots: tuple[int, ...]
    slopes: tuple[float, ...]
    c: float
    d: float
    e: float
    link: Link = NO_LINK

    def seconds(self, step: StepFeatures) -> float:
        """See the class."""
        moves = self.link.seconds(step)
        if not step.computes:
            return moves
        rise = sum(slope * count for slope, count in zip(self.slopes, pieces(step.num_tokens, self.knots), strict=True))
        work = self.c * step.decode_context + self.d * step.prefill_work + self.e * step.num_seqs
        return self.base + rise + work + moves
