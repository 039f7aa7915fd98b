"""The kernels, built once per run."""

from __future__ import annotations

import pytest

from hopon.native.build import build


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    build()
