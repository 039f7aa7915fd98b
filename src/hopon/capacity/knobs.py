"""The knobs that are tuned, settings that differ in them, and the values that are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = int | str

KNOBS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "num_kv_blocks", "policy")
"""In the order in which they are tried: seats decide most. Named as the flags of ``hopon serve``."""

PRESETS = ("hopon", "vllm", "sarathi", "sglang", "tgi", "orca")
"""Tried where nobody says which. Systems that batch whole requests are left out: they never win."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings by what they change of a server without flags; knobs in the order of :data:`KNOBS`."""

    values: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Candidate:
        """From knobs in any order."""
        return cls(tuple((name, values[name]) for name in KNOBS if name in values))

    def turned(self, name: str, value: Value) -> Candidate:
        """The same with another value of one knob."""
        return Candidate.of(dict(self.values) | {name: value})

    @property
    def flags(self) -> list[str]:
        """For ``hopon serve``."""
        return [word for name, value in self.values for word in (_flag(name), str(value))]

    def __str__(self) -> str:
        return " ".join(self.flags) or "no flags"


def parse_knob(text: str) -> tuple[str, list[Value]]:
    """``max-num-seqs=16,32,64``: a knob and its values.

    Raises:
        ValueError: names what is unknown or no number.
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if name not in KNOBS:
        known = ", ".join(knob.replace("_", "-") for knob in KNOBS)
        raise ValueError(f"unknown knob {name.replace('_', '-')!r}; known: {known}")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if not equals or not words:
        raise ValueError(f"a knob is given with its values, such as {name.replace('_', '-')}=..., got {text!r}")
    if name == "policy":
        return name, list(words)
    try:
        return name, [int(word) for word in words]
    except ValueError:
        raise ValueError(f"values of {name.replace('_', '-')} are whole numbers, got {values!r}") from None


def ladder(name: str, now: Value) -> list[Value]:
    """Values of a knob around the present one; for the chunk size, 0 means that only the budget limits it."""
    if name == "policy":
        return list(PRESETS)
    assert isinstance(now, int), "the others are numbers"
    if name == "long_prefill_token_threshold":
        return [0, 32, 64, 128, 256]
    if name == "num_kv_blocks":
        return [now // 4, now // 2, now, 2 * now]
    return [max(1, int(now * factor)) for factor in (0.125, 0.25, 0.5, 1, 2, 4)]


def doublings(now: int, count: int = 7) -> Sequence[int]:
    """From the present value upwards."""
    return [now * 2**i for i in range(count)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
