"""A model on disk, whichever format: its configuration, its tensors under canonical names, its generation defaults.

Knows nothing of tokenizers, packing or kernels; the text layer finds its own files through ``Source.path``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hopon.model.config import ModelConfig
from hopon.model.names import Kind, expected_shapes, file_name
from hopon.model.source_folder import folder_config, generation_defaults
from hopon.model.source_gguf import gguf_config
from hopon.model.weights.gguf import GGUF
from hopon.model.weights.reader import Codes, Floats, Tensor, WeightReader, some
from hopon.model.weights.safetensors import Folder


@dataclass(frozen=True, kw_only=True)
class Source:
    """An open model.

    Args:
        path: the GGUF file or the Hugging Face folder.
        kind: which of the two.
        config: what model it is.
        reader: the open file or folder; its tensors have the file's names.
        generation: sampling defaults that the model brings (``temperature``, ``top_p``, ``top_k``, ``min_p``,
            ``repetition_penalty``, those that are there); whoever applies them says so.
    """

    path: Path
    kind: Kind
    config: ModelConfig
    reader: WeightReader
    generation: Mapping[str, float] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        """Type and shape of a tensor, by canonical name (see ``names``)."""
        return self.reader.tensors[file_name(name, self.kind)]

    def float32(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows ``start:stop`` of a tensor as float32."""
        return self.reader.float32(file_name(name, self.kind), start, stop)

    def codes(self, name: str, start: int = 0, stop: int | None = None) -> Codes | None:
        """Rows ``start:stop`` of a matrix as integers, or None where the file does not hold such."""
        return self.reader.codes(file_name(name, self.kind), start, stop)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that weights are read from."""
        return tuple(sorted({tensor.path for tensor in self.reader.tensors.values()}))


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a ``.gguf`` file or a Hugging Face folder and check that it holds exactly the tensors it should.

    A model that is declared tied but brings a head of its own keeps that head if it differs from the embedding, with
    a warning: somebody stored it. An equal one is left out.

    Raises:
        OSError: a file is missing or cannot be read; names it.
        ValueError: the file is broken, the architecture or a setting is not supported, or tensors are missing, unused
            or of the wrong shape; names the file and the values.
    """
    path = Path(path)
    if path.is_dir():
        folder = Folder(path)
        source = Source(
            path=path,
            kind="huggingface",
            config=folder_config(folder),
            reader=folder,
            generation=generation_defaults(folder),
        )
    elif path.exists():
        file = GGUF(path)
        source = Source(path=path, kind="gguf", config=gguf_config(file), reader=file)
    else:
        raise FileNotFoundError(f"{path}: no such file or folder")
    return _checked(source)


def _checked(source: Source) -> Source:
    tensors = source.reader.tensors
    head = file_name("head.weight", source.kind)
    unused = {head} if source.config.tied and head in tensors else set()
    if unused and not _equal(source, "head.weight", "embed.weight"):
        warnings.warn(
            f"{source.path}: declared tied, but {head} differs from the embedding: using {head} as the head",
            stacklevel=3,
        )
        source, unused = replace(source, config=replace(source.config, tied=False)), set()
    shapes = {file_name(name, source.kind): shape for name, shape in expected_shapes(source.config).items()}
    if missing := shapes.keys() - tensors.keys():
        raise ValueError(f"{source.path}: {len(missing)} tensors are missing: {some(missing)}")
    if extra := {name for name in tensors.keys() - shapes.keys() - unused if not _known_unused(name)}:
        raise ValueError(
            f"{source.path}: {len(extra)} tensors have no place in a {source.config.family} model: {some(extra)}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{tensors[name].path}: tensor {name} has shape {tensors[name].shape}, the configuration says {shape}"
            )
    return source


def _known_unused(name: str) -> bool:
    """Rope frequencies: the GGUF ones went into the configuration; old folders store what the configuration says."""
    return name == "rope_freqs.weight" or name.endswith(".rotary_emb.inv_freq")


def _equal(source: Source, one: str, other: str) -> bool:
    if source.tensor(one).shape != source.tensor(other).shape:
        return False
    rows = source.tensor(one).shape[0]
    return all(
        np.array_equal(source.float32(one, start, start + 4096), source.float32(other, start, start + 4096))
        for start in range(0, rows, 4096)
    )
