"""Kernels built once per run, and every level forced in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hopon.native import Library, Pool, available_levels, load
from hopon.native.build import build, levels_of_machine


@pytest.fixture(scope="session")
def built_levels() -> tuple[str, ...]:
    build()
    return available_levels()


@pytest.fixture(scope="session", params=levels_of_machine())
def library(request: pytest.FixtureRequest, built_levels: tuple[str, ...]) -> Library:
    """The library of one instruction level."""
    if request.param not in built_levels:
        pytest.skip(f"this CPU does not support the {request.param} kernels")
    return load(request.param)


@pytest.fixture
def pool(library: Library) -> Iterator[Pool]:
    """One worker: the caller."""
    with library.pool(1) as one:
        yield one


@pytest.fixture
def pool2(library: Library) -> Iterator[Pool]:
    """Two workers."""
    with library.pool(2) as two:
        yield two
