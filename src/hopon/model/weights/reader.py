"""What both file formats give: named tensors, readable by rows. Knows nothing of either format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Where a tensor lies. ``shape`` is in numpy order (outputs first), ``offset`` and ``nbytes`` are in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """Integer weights: w = scale * code + minimum, with one scale and one minimum per 32 columns.

    ``codes`` uint8 [N, K]; ``scale`` and ``minimum`` float16 [N, K / 32]; ``bits`` is 4 (codes 0..15), 5 or 8 (0..255).
    """

    codes: Bytes
    scale: NDArray[np.float16]
    minimum: NDArray[np.float16]
    bits: int


class WeightReader(Protocol):
    """Tensors of one model, in one file or several."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors, by the names that the files use."""

    def float32(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows ``start:stop`` of a tensor (first axis), as float32."""

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes | None:
        """Rows ``start:stop`` of a matrix as integers, or None where the file does not hold such."""


def some(names: Iterable[str]) -> str:
    """A few of many names for an error message: the first eight in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return ", ".join(ordered[:8]) + more if ordered else "none"
