"""The GGUF reader against the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hopon.model.weights.gguf import GGUF

SIMPLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
KBLOCK = ["Q4_K", "Q5_K", "Q6_K"]
TYPES = SIMPLE + KBLOCK
# byte positions of half-precision numbers in a block: random bits there would be infinities
HALVES = {
    "F16": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.uint8]]:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind in ("F32", "BF16"):
        values = rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint32)
        return values.view(np.uint8) if kind == "F32" else (values >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (rows * cols // block, size), np.uint8)
    for position in HALVES[kind]:
        values = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, position : position + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(tmp_path / "sample.gguf", "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.words", ["ab", "", "ç"])
    writer.add_array("a.numbers", [1, 2, 3])
    for kind in TYPES:
        raw = random_blocks(kind, 3, 512, rng)
        writer.add_tensor(f"{kind}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.add_tensor("vector", rng.standard_normal(5).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "sample.gguf"


def test_metadata(sample: Path) -> None:
    """Every kind of metadata value comes back as written."""
    meta = GGUF(sample).metadata
    assert (meta["a.number"], meta["a.float"], meta["a.flag"], meta["a.text"]) == (7, 0.5, True, "grüße")
    assert meta["a.words"] == ["ab", "", "ç"]
    assert meta["a.numbers"].tolist() == [1, 2, 3]
    assert meta["general.architecture"] == "llama"


@pytest.mark.parametrize("kind", TYPES)
def test_dequantise_equals_the_gguf_package(sample: Path, kind: str) -> None:
    """Random blocks of every type dequantise to the very bits of the gguf package, whole and by rows."""
    name = f"{kind}.weight"
    oracle = next(t for t in gguf.GGUFReader(sample).tensors if t.name == name)
    expected = gguf.dequantize(oracle.data, oracle.tensor_type).astype(np.float32)
    ours = GGUF(sample)
    assert ours.tensors[name].shape == (3, 512)
    assert ours.float32(name).tobytes() == expected.tobytes()
    assert ours.float32(name, 1, 3).tobytes() == expected[1:3].tobytes()


@pytest.mark.parametrize("kind", [k for k in TYPES if k.startswith("Q") and k != "Q6_K"])
def test_codes_mean_the_same_weights(sample: Path, kind: str) -> None:
    """scale * code + minimum equals the dequantised weights; exactly for simple blocks, within half precision for K."""
    file = GGUF(sample)
    got = file.codes(f"{kind}.weight")
    assert got is not None
    assert got.bits == int(kind[1])
    assert got.codes.max() < 2**got.bits
    groups = got.codes.reshape(3, 16, 32).astype(np.float64)
    weights = groups * got.scale.astype(np.float64)[..., None] + got.minimum.astype(np.float64)[..., None]
    exact = file.float32(f"{kind}.weight").astype(np.float64).reshape(3, 16, 32)
    size = np.abs(groups * got.scale.astype(np.float64)[..., None]) + np.abs(got.minimum.astype(np.float64))[..., None]
    assert (np.abs(weights - exact) <= size * (2**-11 if kind.endswith("K") else 2**-24)).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q6_K"])
def test_types_without_codes(sample: Path, kind: str) -> None:
    """Types that do not fit groups of 32 say so with None."""
    assert GGUF(sample).codes(f"{kind}.weight") is None


def test_vector_and_raw(sample: Path) -> None:
    """One-dimensional tensors and raw bytes are readable."""
    file = GGUF(sample)
    assert file.float32("vector").shape == (5,)
    assert file.raw("Q4_1.weight").shape == (3, 512 // 32 * 20)


def test_wrong_magic(tmp_path: Path) -> None:
    """A file that is something else is refused by name."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"x\.gguf: not a GGUF file"):
        GGUF(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"x\.gguf: not a GGUF file: 4 bytes"):
        GGUF(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_wrong_version(tmp_path: Path, version: int) -> None:
    """Unknown versions (a big-endian file looks like one) are refused with the number."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(100))
    with pytest.raises(ValueError, match=f"version {version}"):
        GGUF(path)


def test_every_truncation_is_an_error(sample: Path, tmp_path: Path) -> None:
    """However a file is cut, opening it is a ValueError that names the file; nothing else escapes."""
    whole = sample.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1500, 7), len(whole) - 4096, len(whole) - 32]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GGUF(cut)


def test_random_damage_is_an_error_or_harmless(sample: Path, tmp_path: Path) -> None:
    """Random bytes in the header give a ValueError or a readable file, never another exception."""
    rng = np.random.default_rng(0)
    whole = sample.read_bytes()
    bad = tmp_path / "bad.gguf"
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, 1000, 3):
            data[position] = rng.integers(256)
        bad.write_bytes(data)
        try:
            file = GGUF(bad)
        except ValueError as error:
            assert "bad.gguf" in str(error)  # noqa: PT017
        else:
            assert len(file.tensors) <= len(TYPES) + 1


def test_unknown_tensor_type(tmp_path: Path) -> None:
    """A type we do not read is named, with the tensor."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("odd", np.zeros((1, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'odd' has type 10"):
        GGUF(path)
