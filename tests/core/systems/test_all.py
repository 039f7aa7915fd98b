"""What holds for every published system: progress, conservation, one end each, the same outputs, no look ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hopon.core.policy.presets import PRESETS, preset_class
from tests.core.systems.drive import check_identity, check_no_peeking, run_trace


def resolves(name: str) -> bool:
    try:
        preset_class(name)
    except ValueError:
        return False
    return True


NAMES = [name for name in PRESETS if resolves(name)]


def test_every_name_of_the_table_resolves() -> None:
    """No system of the table is missing."""
    assert list(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_random_traces(name: str, effort: Callable[[int, int], int]) -> None:
    """Every step makes progress or says when to wake, budgets hold, memory and seats are conserved, all end once."""
    for seed in range(effort(40, 1500)):
        try:
            run_trace(name, seed)
        except AssertionError as error:
            raise AssertionError(f"{name}, trace {seed}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
def test_alone_or_in_any_crowd(name: str, effort: Callable[[int, int], int]) -> None:
    """On a device made of integers, a policy changes when a request is served, never what it gets."""
    served = 0
    count = effort(15, 400)
    for seed in range(count):
        served += check_identity(name, seed)[0]
    assert served > 4 * count, "most requests must be served to their end"


@pytest.mark.parametrize("name", NAMES)
def test_no_peeking(name: str, effort: Callable[[int, int], int]) -> None:
    """When a request will emit its end token never changes an earlier plan."""
    count = effort(15, 400)
    assert sum(check_no_peeking(name, seed) for seed in range(count)) > count // 3
