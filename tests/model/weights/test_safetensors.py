"""Hugging Face folders against the ``safetensors`` package, and what is wrong with broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hopon.model.weights.safetensors import Folder


def write(folder: Path, name: str, tensors: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    parts: dict[str, dict[str, Any]] = {
        "model-00001-of-00002.safetensors": {"a": rng.standard_normal((4, 6)).astype(np.float32)},
        "model-00002-of-00002.safetensors": {"b": rng.standard_normal(5).astype(np.float16)},
    }
    for file, tensors in parts.items():
        write(tmp_path, file, tensors)
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_values_and_rows(tmp_path: Path) -> None:
    """F32 and F16 come back exactly, whole and by rows."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "a": rng.standard_normal((4, 6)).astype(np.float32),
        "b": rng.standard_normal((3, 2)).astype(np.float16),
    }
    write(tmp_path, "model.safetensors", tensors)
    folder = Folder(tmp_path)
    assert (folder.float32("a") == tensors["a"]).all()
    assert (folder.float32("b") == tensors["b"].astype(np.float32)).all()
    assert (folder.float32("a", 1, 3) == tensors["a"][1:3]).all()
    assert folder.tensors["a"].shape == (4, 6)


def test_bf16(tmp_path: Path) -> None:
    """BF16 is the upper half of a float32."""
    values = np.array([[1.5, -2.0], [0.0, 3.140625]], np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (tmp_path / "config.json").write_text("{}")
    assert (Folder(tmp_path).float32("a") == values).all()


def test_shards(sharded: Path) -> None:
    """Tensors of all shards are there."""
    folder = Folder(sharded)
    assert set(folder.tensors) == {"a", "b"}
    assert folder.float32("b").shape == (5,)


def test_v096_only_files_named_by_the_index_are_read(sharded: Path) -> None:
    """A second copy of the weights beside the shards is not opened, be it broken."""
    (sharded / "consolidated.safetensors").write_bytes(b"junk")
    (sharded / "model.safetensors").write_bytes(b"junk")
    folder = Folder(sharded)
    assert set(folder.tensors) == {"a", "b"}
    assert {tensor.path.name for tensor in folder.tensors.values()} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_missing_shard(sharded: Path) -> None:
    """A missing shard is an error with its file name."""
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: missing"):
        Folder(sharded)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated_shard(sharded: Path, keep: int) -> None:
    """A shard cut anywhere is an error with its file name."""
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors: (truncated|corrupt)"):
        Folder(sharded)


def test_stale_shard(sharded: Path) -> None:
    """A shard of another model is an error that names it and the tensors."""
    write(sharded, "model-00001-of-00002.safetensors", {"other": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors: stale.*shard: a;.*index: other"):
        Folder(sharded)


def test_no_weights(tmp_path: Path) -> None:
    """A folder without config or weights says which file it misses."""
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        Folder(tmp_path)


def test_unsupported_dtype(tmp_path: Path) -> None:
    """An integer tensor is refused by name and type."""
    write(tmp_path, "model.safetensors", {"q": np.zeros(3, np.int8)})
    with pytest.raises(ValueError, match="'q' has type I8"):
        Folder(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_broken_config(tmp_path: Path, text: str) -> None:
    """A config that is no JSON object is an error with the file's name."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        Folder(tmp_path)
