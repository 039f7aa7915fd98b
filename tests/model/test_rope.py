"""Rope frequencies against the published formulae, written out one frequency at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hopon.model.rope import Rope, RopeScaling
from hopon.model.source_folder import folder_config
from hopon.model.weights.safetensors import Folder
from tests.model.files import tiny_config, write_folder
from tests.model.reference import random_checkpoint

DIM, THETA = 64, 10000.0
PLAIN = [THETA ** (-2 * i / DIM) for i in range(DIM // 2)]


def inverse(scaling: RopeScaling | None, length: int = 100) -> list[float]:
    return list(Rope(theta=THETA, dim=DIM, scaling=scaling).inverse_frequencies(length))


def test_v090_none_and_linear() -> None:
    """Without scaling theta^(-2i/d); linear interpolation divides every frequency by the factor."""
    assert inverse(None) == pytest.approx(PLAIN, rel=1e-12)
    linear = RopeScaling(kind="linear", factor=4.0, original_context=2048)
    assert inverse(linear) == pytest.approx([f / 4 for f in PLAIN], rel=1e-12)


@pytest.mark.parametrize("length", [1000, 2048, 6000])
def test_v090_dynamic_is_fixed_for_the_served_length(length: int) -> None:
    """Dynamic NTK at the served length; up to the original one it changes nothing."""
    scaling = RopeScaling(kind="dynamic", factor=4.0, original_context=2048)
    base = THETA
    if length > 2048:
        base = THETA * (4.0 * length / 2048 - 3.0) ** (DIM / (DIM - 2))
    assert inverse(scaling, length) == pytest.approx([base ** (-2 * i / DIM) for i in range(DIM // 2)], rel=1e-12)


def test_v090_llama3() -> None:
    """The five-field form: short waves stay, long ones are stretched, those between are blended."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    expected = []
    for f in PLAIN:
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            expected.append(f)
        elif wavelength > 8192 / 1.0:
            expected.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * f / 8 + smooth * f)
    assert inverse(scaling) == pytest.approx(expected, rel=1e-12)
    assert len(set(np.round(np.array(expected) / PLAIN, 6))) > 2


@pytest.mark.parametrize("truncate", [True, False])
def test_v090_yarn(truncate: bool) -> None:
    """Fast dimensions stay, slow ones are stretched, a ramp between; q and k grow by 0.1 ln(factor) + 1."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=4096, truncate=truncate)

    def dimension(turns: float) -> float:
        return DIM * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, f in enumerate(PLAIN):
        stretched = min(max((i - low) / (high - low), 0), 1)
        expected.append(f / 4 * stretched + f * (1 - stretched))
    assert inverse(scaling) == pytest.approx(expected, rel=1e-12)
    assert Rope(theta=THETA, dim=DIM, scaling=scaling).magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_v094_divisors_of_the_file() -> None:
    """Frequencies are divided by the factors that a file brings."""
    divisors = tuple(float(1 + i % 3) for i in range(DIM // 2))
    rope = Rope(theta=THETA, dim=DIM, divisors=divisors)
    assert list(rope.inverse_frequencies(10)) == pytest.approx([f / d for f, d in zip(PLAIN, divisors, strict=True)])


def test_table_beyond_the_original_length() -> None:
    """The table is cos and sin of position times frequency, times yarn's magnitude, at every position."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=64)
    rope = Rope(theta=THETA, dim=DIM, scaling=scaling)
    table = rope.table(256)
    assert table.shape == (256, DIM)
    assert table.dtype == np.float32
    for position in (0, 1, 63, 64, 255):
        for i, f in enumerate(rope.inverse_frequencies(256)):
            assert table[position, i] == pytest.approx(math.cos(position * f) * rope.magnitude, abs=1e-6)
            assert table[position, 32 + i] == pytest.approx(math.sin(position * f) * rope.magnitude, abs=1e-6)


SCALINGS: list[tuple[dict[str, Any], RopeScaling, int]] = [
    ({"factor": 2.0}, RopeScaling(kind="linear", factor=2.0, original_context=256), 512),
    ({"factor": 2.0}, RopeScaling(kind="dynamic", factor=2.0, original_context=256), 512),
    (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        RopeScaling(kind="llama3", factor=8.0, original_context=32, low_freq_factor=1.0, high_freq_factor=4.0),
        256,
    ),
    (
        {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "attention_factor": 1.5},
        RopeScaling(kind="yarn", factor=4.0, original_context=128, beta_fast=16, attention_factor=1.5),
        512,
    ),
]


@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(("fields", "expected", "context"), SCALINGS, ids=[s.kind for _, s, _ in SCALINGS])
def test_v090_key_styles(tmp_path: Any, style: str, fields: Any, expected: RopeScaling, context: int) -> None:
    """The scaling is read whichever of the three key styles a configuration has."""
    config = tiny_config()
    if style == "rope_parameters":
        config |= {"rope_parameters": {"rope_type": expected.kind, "rope_theta": 5000.0, **fields}}
        del config["rope_theta"]
    else:
        config |= {"rope_scaling": {style: expected.kind, **fields}, "rope_theta": 5000.0}
    model = folder_config(Folder(write_folder(tmp_path, config, random_checkpoint(tiny_config()))))
    assert model.rope == Rope(theta=5000.0, dim=16, scaling=expected)
    assert model.context_length == context


@pytest.mark.parametrize("style", ["type", "rope_type"])
def test_v090_unknown_type_is_an_error(tmp_path: Any, style: str) -> None:
    """An unknown scaling stops the start with its name and the known ones; so does a missing field."""
    weights = random_checkpoint(tiny_config())
    config = tiny_config(rope_scaling={style: "longrope", "factor": 2.0})
    with pytest.raises(ValueError, match=r"longrope.*linear, dynamic, llama3, yarn"):
        folder_config(Folder(write_folder(tmp_path, config, weights)))
    config = tiny_config(rope_scaling={style: "llama3", "factor": 2.0})
    with pytest.raises(ValueError, match="original_max_position_embeddings is missing"):
        folder_config(Folder(write_folder(tmp_path, config, weights)))
    config = tiny_config(rope_scaling={style: "linear", "factor": 0.5})
    with pytest.raises(ValueError, match=r"config\.json: .*at least 1, got 0\.5"):
        folder_config(Folder(write_folder(tmp_path, config, weights)))
