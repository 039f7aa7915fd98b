"""Distributions of lengths in tokens, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from typing import Protocol


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, random: Random) -> int:
        """At least 1."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must be 1 <= low <= high, got {self.low}-{self.high}")

    def draw(self, random: Random) -> int:
        """One of them."""
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with a mean, drawn again above a cap (as in Anyscale's comparison of June 2023), rounded."""

    mean: float
    cap: int

    def __post_init__(self) -> None:
        if not self.mean > 0 or self.cap < 1:
            raise ValueError(f"an exponential needs a mean above 0 and a cap of at least 1, got {self.mean}:{self.cap}")

    def draw(self, random: Random) -> int:
        """Redrawn until it is below the cap."""
        while (value := round(random.expovariate(1 / self.mean))) > self.cap:
            pass
        return max(1, value)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal with a mean and a coefficient of variation, clipped to [1, cap]."""

    mean: float
    variation: float
    cap: int

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.variation >= 0) or self.cap < 1:
            raise ValueError(
                f"a lognormal needs a mean above 0, a variation of at least 0 and a cap of at least 1, "
                f"got {self.mean}:{self.variation}:{self.cap}"
            )

    def draw(self, random: Random) -> int:
        """Rounded."""
        sigma = sqrt(log(1 + self.variation**2))
        value = exp(random.gauss(log(self.mean) - sigma**2 / 2, sigma))
        return min(self.cap, max(1, round(value)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Values at equally spaced probabilities from 0 to 1, straight lines between them: a measured distribution."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2 or self.values[0] < 1 or list(self.values) != sorted(self.values):
            raise ValueError(f"quantiles must be at least two rising values of at least 1, got {self.values}")

    def draw(self, random: Random) -> int:
        """By inversion."""
        place = random.random() * (len(self.values) - 1)
        low = int(place)
        return round(self.values[low] + (place - low) * (self.values[low + 1] - self.values[low]))


def parse_lengths(text: str) -> Lengths:
    """``512``, ``32-512``, ``exp:MEAN:CAP`` or ``lognormal:MEAN:VARIATION:CAP``.

    Raises:
        ValueError: names the text and the forms.
    """
    try:
        match text.split(":"):
            case ["exp", mean, cap]:
                return Exponential(float(mean), int(cap))
            case ["lognormal", mean, variation, cap]:
                return Lognormal(float(mean), float(variation), int(cap))
            case [plain]:
                low, dash, high = plain.partition("-")
                return Uniform(int(low), int(high if dash else low))
            case _:
                raise ValueError("no such form")
    except ValueError as error:
        forms = "512, 32-512, exp:MEAN:CAP or lognormal:MEAN:VARIATION:CAP"
        raise ValueError(f"lengths {text!r}: {error}; known forms: {forms}") from error
