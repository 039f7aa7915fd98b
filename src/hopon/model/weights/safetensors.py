"""Reads a Hugging Face folder: ``config.json`` and safetensors weights, in one file or in shards named by an index.

Format: the safetensors specification (Apache-2.0, Hugging Face). Only files that the index names are opened, so a
second copy of the weights beside them is never read. Knows files only: nothing of architectures or packing.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from hopon.model.weights.reader import Codes, Floats, Tensor, some

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ITEM_SIZE = {"F32": 4, "F16": 2, "BF16": 2}


class Folder:
    """An open Hugging Face folder, its weight files memory-mapped.

    ``config`` and ``generation_config`` are the parsed JSON objects (the second one empty where there is no such
    file). ``tensors`` maps the file's names to :class:`Tensor`.

    Raises:
        FileNotFoundError: ``config.json``, the weights or a shard is missing; names the file.
        ValueError: a file is truncated, corrupt or does not match the index, or a tensor is neither F32, F16 nor
            BF16; names the file and what is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.tensors: dict[str, Tensor] = {}
        if (self.path / _INDEX).exists():
            self._open_shards()
        elif (self.path / _SINGLE).exists():
            self.tensors = self._open(self.path / _SINGLE)
        else:
            raise FileNotFoundError(f"{self.path}: no weights: neither {_SINGLE} nor {_INDEX} is there")

    def float32(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows ``start:stop`` of a tensor (first axis), as float32."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._maps[tensor.path], np.uint8, tensor.nbytes, tensor.offset)
        dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.type]
        values = data.view(dtype).reshape(tensor.shape)[start:stop]
        if tensor.type == "BF16":
            widened: Floats = (values.astype(np.uint32) << 16).view(np.float32)
            return widened
        return values.astype(np.float32)

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes | None:
        """None: these files hold no integers."""
        return None

    def _open_shards(self) -> None:
        index = read_json(self.path / _INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ValueError(f"{self.path / _INDEX}: corrupt: no weight_map from tensors to files")
        for file in dict.fromkeys(names.values()):
            shard = self.path / file
            if shard.parent != self.path:
                raise ValueError(f"{self.path / _INDEX}: corrupt: it names {file!r}, which is not in this folder")
            if not shard.exists():
                raise FileNotFoundError(f"{shard}: missing, but {_INDEX} names it")
            tensors = self._open(shard)
            wanted = {name for name, where in names.items() if where == file}
            if wanted != tensors.keys():
                raise ValueError(
                    f"{shard}: stale: it does not match {_INDEX} (not in the shard: {some(wanted - tensors.keys())}; "
                    f"not in the index: {some(tensors.keys() - wanted)})"
                )
            self.tensors |= tensors

    def _open(self, path: Path) -> dict[str, Tensor]:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ValueError(f"{path}: truncated or not a safetensors file: {size} bytes are less than its header")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise ValueError(
                    f"{path}: corrupt or not a safetensors file: its header is not JSON ({error})"
                ) from None
            self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not isinstance(header, dict):
            raise ValueError(f"{path}: corrupt: its header is not a JSON object")
        header.pop("__metadata__", None)
        tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
        end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
        if end != size:
            raise ValueError(
                f"{path}: {'truncated' if end > size else 'corrupt'}: its header says {end} bytes, it has {size}"
            )
        return tensors


def _entry(path: Path, name: str, entry: Any, base: int) -> Tensor:
    try:
        kind, shape, (start, stop) = (
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            map(int, entry["data_offsets"]),
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: corrupt: tensor {name!r} has no dtype, shape and two offsets") from None
    if kind not in _ITEM_SIZE:
        raise ValueError(
            f"{path}: tensor {name!r} has type {kind}, which is not supported ({', '.join(_ITEM_SIZE)} are)"
        )
    nbytes = int(np.prod(shape, dtype=object)) * _ITEM_SIZE[kind]
    if start < 0 or stop - start != nbytes or not nbytes:
        raise ValueError(
            f"{path}: corrupt: tensor {name!r} of shape {shape} is {stop - start} bytes long, not {nbytes}"
        )
    return Tensor(name=name, type=kind, shape=shape, offset=base + start, nbytes=nbytes, path=path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises OSError or ValueError with the file's name."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value
