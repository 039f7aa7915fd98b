"""Packed weights: the right numbers in the right precision, and a disk copy that is never used wrongly."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hopon.core.config import EngineOptions
from hopon.model.cpu import cache_dtype, load
from hopon.model.families import build_program
from hopon.model.source import Source, open_source
from hopon.model.weights.store import Layout, PackedStore, WeightDtype, load_weights, plan_layout
from hopon.native import CacheDtype, Dtype
from hopon.native.pack import PackedMatrix, from_bf16, packed_sizes, to_bf16, unpack
from tests.model.drive import deployed, request, run
from tests.model.files import tiny_config, write_folder, write_gguf
from tests.model.reference import forward, log_softmax, random_checkpoint


def quiet(what: str, done: float) -> None:
    pass


def packed(source: Source, dtype: WeightDtype, cache: Path | None = None) -> tuple[Layout, PackedStore]:
    program = build_program(source.config)
    layout = plan_layout(source, program, dtype)
    return layout, load_weights(source, program, layout, cache, quiet)


def view(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def values(store: PackedStore, name: str) -> NDArray[np.float64]:
    """What the packed bytes of a matrix mean, in float64."""
    m = store.matrix(name)
    data, scales = packed_sizes(Dtype(m.dtype), m.rows, m.cols)
    return unpack(
        PackedMatrix(
            dtype=Dtype(m.dtype),
            rows=m.rows,
            cols=m.cols,
            data=view(m.data, data),
            scales=view(m.scales, scales).view(np.uint16) if scales else None,
        )
    )


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Inputs that are multiples of 32, as block formats need them; more rows than one packing piece has."""
    return tiny_config(hidden_size=256, intermediate_size=512, vocab_size=9001, num_hidden_layers=1, head_dim=32)


@pytest.fixture(scope="module")
def weights(config: dict[str, Any]) -> dict[str, Any]:
    return random_checkpoint(config)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("dtype", ["auto", "f32", "q8"])
def test_packed_integers_are_the_files_own(
    tmp_path: Path, config: dict[str, Any], weights: dict[str, Any], kind: str, dtype: WeightDtype
) -> None:
    """Stacked, padded and split into pieces, every packed weight is the file's; exactly, but for bfloat16 offsets."""
    source = open_source(write_gguf(tmp_path / "m.gguf", config, weights, matrix_type=kind))
    layout, store = packed(source, dtype)
    for name, place in layout.matrices.items():
        parts = build_program(source.config).matrices[name].weights
        expected = np.concatenate([source.float32(part) for part in parts])
        got = values(store, name)
        rounding = 2**-9 if kind.endswith("_1") and dtype != "f32" else 2e-7
        assert np.abs(got - expected).max() <= rounding * np.abs(expected).max()
        own = Dtype.I4 if kind.startswith("Q4") else Dtype.I8
        assert place.dtype == {"auto": own, "f32": Dtype.F32, "q8": Dtype.I8}[dtype]
    for vector in layout.vectors:
        assert (store.vector(vector) == source.float32(vector)).all()


def test_q4_keeps_embedding_and_head_at_8_bits(tmp_path: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """Layers get 4 bits, embedding and head 8; values stay within half a step of the group's range."""
    source = open_source(write_folder(tmp_path, config, weights))
    layout, store = packed(source, "q4")
    assert layout.description == "i4 (head i8)"
    for name, place in layout.matrices.items():
        assert place.dtype == (Dtype.I8 if name in ("embed", "head") else Dtype.I4)
        parts = build_program(source.config).matrices[name].weights
        groups = np.concatenate([source.float32(part) for part in parts]).reshape(place.rows, -1, 32)
        step = np.ptp(groups, axis=-1, keepdims=True) / (15 if place.dtype is Dtype.I4 else 127)
        assert (np.abs(values(store, name).reshape(groups.shape) - groups) <= 0.51 * step + 2e-3).all()


def test_float_files_become_bf16(tmp_path: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """auto packs float files as bfloat16, rounded to nearest even."""
    source = open_source(write_folder(tmp_path, config, weights))
    layout, store = packed(source, "auto")
    assert layout.description == "bf16"
    expected = from_bf16(to_bf16(source.float32("embed.weight")))
    assert (values(store, "embed") == expected).all()
    assert cache_dtype("auto", layout) is CacheDtype.F16
    assert cache_dtype("bf16", layout) is CacheDtype.BF16


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.05), ("q8", 0.2), ("q4", 0.2)])
def test_scores_are_those_of_the_packed_weights(tmp_path: Path, dtype: WeightDtype, tolerance: float) -> None:
    """Log-probabilities equal a float64 model with the very weights that were packed, up to rounding of inputs."""
    config = tiny_config(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    original = random_checkpoint(config)
    source = open_source(write_folder(tmp_path, config, original))
    _, store = packed(source, dtype)
    at = "model.layers."
    rounded: dict[str, Any] = dict(original)
    rounded["model.embed_tokens.weight"], rounded["lm_head.weight"] = values(store, "embed"), values(store, "head")
    for i in range(2):
        qkv = values(store, f"layers.{i}.attn.q+layers.{i}.attn.k+layers.{i}.attn.v")
        rounded |= {
            f"{at}{i}.self_attn.{n}_proj.weight": w for n, w in zip("qkv", np.split(qkv, [64, 96]), strict=True)
        }
        gate_up = values(store, f"layers.{i}.ffn.gate+layers.{i}.ffn.up")
        rounded[f"{at}{i}.mlp.gate_proj.weight"], rounded[f"{at}{i}.mlp.up_proj.weight"] = np.split(gate_up, 2)
        rounded[f"{at}{i}.mlp.down_proj.weight"] = values(store, f"layers.{i}.ffn.down")
        rounded[f"{at}{i}.self_attn.o_proj.weight"] = values(store, f"layers.{i}.attn.o")
    prompt = np.random.default_rng(0).integers(0, 130, 60).tolist()
    with deployed(tmp_path, dtype=dtype, kv_cache_dtype="f32", threads=1, max_num_seqs=1) as model:
        got = run(model, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]
    expected = log_softmax(forward(rounded, config, prompt))
    scores = [entry.logprob for entry in got.prompt_logprobs]
    assert scores == pytest.approx([expected[i, token] for i, token in enumerate(prompt[1:])], abs=tolerance)


class Steps:
    """What a factory reports."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, what: str, done: float) -> None:
        assert 0 <= done <= 1
        if not self.seen or self.seen[-1] != what:
            self.seen.append(what)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = tiny_config()
    return write_folder(tmp_path / "model", config, random_checkpoint(config))


def start(model: Path, cache: Path, **options: Any) -> list[str]:
    steps = Steps()
    load(EngineOptions(model=str(model), cache_dir=str(cache), threads=1, **options), steps).executor.close()
    return steps.seen


PACKED = ["opening the model", "packing weights", "saving packed weights", "ready"]
CACHED = ["opening the model", "reading packed weights", "ready"]


def test_second_start_reads_the_copy(tiny: Path, tmp_path: Path) -> None:
    """The first start packs and saves, the second one reads the same bytes; another precision is another copy."""
    assert start(tiny, tmp_path) == PACKED
    assert start(tiny, tmp_path) == CACHED
    assert start(tiny, tmp_path, dtype="f32") == PACKED
    assert len(list((tmp_path / "packed").iterdir())) == 2
    source = open_source(tiny)
    _, fresh = packed(source, "auto")
    _, cached = packed(source, "auto", tmp_path)
    assert (values(fresh, "embed") == values(cached, "embed")).all()
    assert (fresh.vector("final_norm.weight") == cached.vector("final_norm.weight")).all()


def test_changed_model_is_packed_anew(tiny: Path, tmp_path: Path) -> None:
    """A file with another time has another key: its old copy is not used."""
    start(tiny, tmp_path)
    os.utime(tiny / "model.safetensors", ns=(1, 1))
    assert start(tiny, tmp_path) == PACKED


@pytest.mark.parametrize("damage", ["truncate", "header", "key", "empty", "longer"])
def test_damaged_copy_is_rebuilt(tiny: Path, tmp_path: Path, damage: str) -> None:
    """A truncated, foreign or damaged copy is never used: a warning names it, and it is written anew."""
    start(tiny, tmp_path)
    (path,) = (tmp_path / "packed").iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncate": data[:-1],
            "header": b"X" + data[1:],
            "key": data[:20] + bytes([data[20] ^ 1]) + data[21:],
            "empty": b"",
            "longer": data + b"\0",
        }[damage]
    )
    with pytest.warns(UserWarning, match=rf"{path.name}: stale, truncated or damaged"):
        assert start(tiny, tmp_path) == PACKED
    assert path.read_bytes() == data
    assert start(tiny, tmp_path) == CACHED


def test_copy_that_cannot_be_written_is_a_warning(tiny: Path, tmp_path: Path) -> None:
    """Without a writable cache folder the model still starts, with a warning; nothing partial is left behind."""
    (tmp_path / "packed").write_text("in the way")
    with pytest.warns(UserWarning, match="packed weights cannot be saved"):
        assert start(tiny, tmp_path) == PACKED
    assert start(tiny, tmp_path / "fresh") == PACKED
    assert [path.suffix for path in (tmp_path / "fresh" / "packed").iterdir()] == [".bin"]


MEASURE = """
import sys, resource
from tests.model.drive import deployed, request, run
from pathlib import Path
model, cache = map(Path, sys.argv[1:])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
base = peak()
options = dict(dtype="auto", kv_cache_memory=64 << 20, cache_dir=str(cache), max_num_seqs=4, threads=1)
with deployed(model, **options) as deployment:
    started = peak()
    run(deployment, [request("a", [i % 1000 for i in range(1200)], max_tokens=2)])
    s = deployment.summary
    print(started - base - s["weight_bytes"], peak() - base - s["weight_bytes"] - s["kv_bytes"] - s["buffer_bytes"])
"""


def test_v098_v099_memory_is_weights_and_kv(smollm2: Path, tmp_path: Path) -> None:
    """Memory stays within weights, KV limit, buffers and 60 MiB, through a long prefill too; packing needs 200 MiB."""

    def measure() -> tuple[int, int]:
        command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(smollm2), str(tmp_path)]
        root = Path(__file__).parents[3]
        text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
        at_start, at_end = map(int, text.split())
        return at_start, at_end

    packing, _ = measure()
    assert packing < 200 << 20
    reading, serving = measure()
    assert reading < 60 << 20
    assert serving < 60 << 20
