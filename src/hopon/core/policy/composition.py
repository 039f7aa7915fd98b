"""Composition: what a step is made of, in which order."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A kind of work that a step gives tokens to."""

    DECODE = "decode"  # running sequences with one token to compute
    PREFILL = "prefill"  # running sequences with more
    ADMIT = "admit"  # waiting sequences


DECODE_FIRST = (Phase.DECODE, Phase.PREFILL, Phase.ADMIT)
"""Running decodes claim the budget first, then running prefill chunks, then the waiting."""
