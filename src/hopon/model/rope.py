"""Rotary position embedding: frequencies of the published scalings, and the table that the kernels read.

Sources: RoPE (Su et al. 2021); linear position interpolation (Chen et al. 2023); dynamic NTK (as in Hugging Face
transformers); llama3 (Llama 3.1 reference code); YaRN (Peng et al. 2023). Computed in float64, stored as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, isfinite, log, pi
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float64]
Kind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How frequencies are stretched beyond the context that the model was first trained on.

    Args:
        kind: which formula.
        factor: how much longer the context has become.
        original_context: tokens of the first training.
        low_freq_factor: llama3: wavelengths above original_context / low_freq_factor are stretched fully.
        high_freq_factor: llama3: those below original_context / high_freq_factor not at all.
        beta_fast: yarn: dimensions that turn more often than this within the original context are not stretched.
        beta_slow: yarn: those that turn less often are stretched fully.
        attention_factor: yarn: multiplies q and k; None means 0.1 ln(factor) + 1.
        truncate: yarn: round the borders between those dimensions to whole dimensions.
    """

    kind: Kind
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"the factor of {self.kind} rope scaling must be at least 1, got {self.factor}")
        if self.original_context < 1:
            raise ValueError(f"the original context of rope scaling must be at least 1, got {self.original_context}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be positive and below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of one model.

    Args:
        theta: base of the frequencies.
        dim: rotated values per head, even.
        interleaved: adjacent pairs (2i, 2i + 1) are rotated; otherwise halves (i, i + dim / 2).
        scaling: the stretching, or None.
        divisors: one per frequency, from a file that brings its own; excludes ``scaling``.
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"rope theta must be a finite number above 1, got {self.theta}")
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rope dimension must be even and at least 2, got {self.dim}")
        if self.divisors and len(self.divisors) != self.dim // 2:
            raise ValueError(f"{self.dim // 2} rope frequency divisors are needed, got {len(self.divisors)}")
        if not all(isfinite(value) and value > 0 for value in self.divisors):
            raise ValueError("rope frequency divisors must be positive and finite")

    def inverse_frequencies(self, max_position: int) -> Frequencies:
        """Radians per position, [dim / 2].

        Dynamic scaling depends on the length that is served. It is fixed here for ``max_position``, not changed as a
        sequence grows: cached keys stay valid and a request's numbers depend on nothing but the deployment. Up to the
        original context it changes nothing.
        """
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        frequencies: Frequencies = self.theta**-exponents
        if self.divisors:
            return frequencies / np.array(self.divisors, np.float64)
        scaling = self.scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        if scaling.kind == "dynamic":
            length = max(max_position, scaling.original_context)
            stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
            base = self.theta * stretch ** (self.dim / (self.dim - 2)) if self.dim > 2 else self.theta
            stretched: Frequencies = base**-exponents
            return stretched
        if scaling.kind == "llama3":
            turns = scaling.original_context * frequencies / (2 * pi)
            smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return _blend(frequencies, scaling.factor, np.clip(smooth, 0, 1))
        low, high = (self._yarn_dimension(scaling, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = floor(low), ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (np.arange(self.dim // 2) - low) / (high - low if high != low else 0.001)
        return _blend(frequencies, scaling.factor, 1 - np.clip(ramp, 0, 1))

    def _yarn_dimension(self, scaling: RopeScaling, turns: float) -> float:
        """The dimension that turns this often within the original context."""
        return self.dim * log(scaling.original_context / (turns * 2 * pi)) / (2 * log(self.theta))

    @property
    def magnitude(self) -> float:
        """Factor on the rotated q and k; 1 but for yarn."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return yarn_magnitude(self.scaling.factor)

    def table(self, max_position: int) -> NDArray[np.float32]:
        """float32 [max_position][dim]: dim / 2 cosines, then as many sines."""
        angles = np.arange(max_position, dtype=np.float64)[:, None] * self.inverse_frequencies(max_position)
        table = np.empty((max_position, self.dim), np.float32)
        np.multiply(np.cos(angles), self.magnitude, out=table[:, : self.dim // 2], casting="same_kind")
        np.multiply(np.sin(angles), self.magnitude, out=table[:, self.dim // 2 :], casting="same_kind")
        return table


def _blend(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """Frequencies kept to this share, and stretched for the rest."""
    return (1 - kept) * frequencies / factor + kept * frequencies


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the attention temperature for a context stretched by ``factor``."""
    return 0.1 * weight * log(factor) + 1
