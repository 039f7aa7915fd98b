"""A claim: what somebody said, and how it is checked. Verdicts are computed when they are asked for, never kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Tag = Literal["closed form", "brute force", "hand-worked"]
"""How it is checked: by a formula; by playing every pass through the scheduler; on an example worked by hand."""


class Verdict(StrEnum):
    """What became of a claim."""

    HOLDS = "holds"
    ASSUMED = "holds if"  # with inputs that are not published and were chosen or fitted; the remark says which
    DIFFERS = "differs"  # not as said; the reason in the remark was computed, too, and is right
    FAILS = "FAILS"


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found.

    Args:
        ours: for people.
        holds: as published.
        explained: not as published, but what the claim's remark says is so.
    """

    ours: str
    holds: bool
    explained: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim.

    Args:
        name: short, unique in its group.
        source: who said it.
        text: what was said, in our words.
        published: the number, as said.
        tag: how it is checked.
        given: input of the check.
        perturbed: another input, under which the verdict must be another: a check that cannot fail shows nothing.
        check: from an input to what was found.
        remark: a sentence where the claim is wrong or only assumed.
        assumed: it rests on inputs that are not published.
        slow: only checked when all is asked for.
    """

    name: str
    source: str
    text: str
    published: str
    tag: Tag
    given: Any
    perturbed: Any
    check: Callable[[Any], Found]
    remark: str = ""
    assumed: bool = False
    slow: bool = False

    def verdict(self, found: Found) -> Verdict:
        """From what was found."""
        if found.holds:
            return Verdict.ASSUMED if self.assumed else Verdict.HOLDS
        return Verdict.DIFFERS if found.explained and self.remark else Verdict.FAILS


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Claims that belong together.

    Args:
        name: what ``--only`` takes.
        title: what they are about.
        claims: in order.
    """

    name: str
    title: str
    claims: tuple[Claim, ...]


def equal(ours: float, published: float, unit: str = "") -> Found:
    """Exactly the number."""
    return Found(amount(ours, unit), ours == published)


def near(ours: float, published: float, *, within: float, unit: str = "") -> Found:
    """The number, give or take ``within`` (in its own unit): what was rounded when it was printed."""
    return Found(amount(ours, unit), abs(ours - published) <= within * (1 + 1e-9))


def between(ours: float, low: float, high: float, unit: str = "") -> Found:
    """Inside a band."""
    return Found(amount(ours, unit), low <= ours <= high)


def amount(value: float, unit: str = "") -> str:
    """A number with its unit, or with a multiplication sign in front where the unit is ``x``."""
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if unit == "x":
        return f"x{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"x{value}"
    return f"{text} {unit}".rstrip()
