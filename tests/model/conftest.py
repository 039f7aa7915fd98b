"""The kernels, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopon.native.build import build
from tests.model.files import tiny_config, write_folder
from tests.model.reference import random_checkpoint


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    build()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_folder(tmp_path_factory.mktemp("tiny"), config, random_checkpoint(config))
