"""Options and fixtures that every part's tests share.

``--soak`` turns the reduced random, fault and load tests into their long versions. A test asks for its size with
the ``effort`` fixture, so that both versions are the same code.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hopon import catalogue
from hopon.cli.environment import cache_root


def pytest_configure() -> None:
    """A shell that starts the tests in its background lets them ignore Ctrl-C, which some of them press."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long versions of random, fault and load tests")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """True when the long versions are wanted."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def effort(soak: bool) -> Callable[[int, int], int]:
    """``effort(reduced, long)`` picks the size of a test."""
    return lambda reduced, long: long if soak else reduced


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct on disk. `make test` obtains it before the tests, so a missing file is a failure."""
    path = catalogue.cached("smollm2-135m", cache_root())
    assert path is not None, "SmolLM2 is not on disk: run `hopon pull smollm2-135m`"
    return path


@pytest.fixture(scope="session")
def qwen_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct on disk; optional, half a gigabyte: `hopon pull qwen2.5-coder-0.5b`."""
    path = catalogue.cached("qwen2.5-coder-0.5b", cache_root())
    if path is None:
        pytest.skip("optional model, not on disk: `hopon pull qwen2.5-coder-0.5b`")
    return path
