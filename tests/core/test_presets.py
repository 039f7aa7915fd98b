"""From a system's name and knobs as text to a preset."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset, preset_class, why_not_serve
from hopon.core.policy.systems.dynamic import Dynamic
from hopon.core.policy.systems.hopon import Hopon
from hopon.core.policy.systems.static import Static
from tests.core.systems.drive import NAMES


def test_a_name_is_a_class() -> None:
    """By the table, or by module and class."""
    assert preset_class("hopon") is Hopon
    assert preset_class("hopon.core.policy.systems.hopon:Hopon") is Hopon
    assert make_preset("hopon") == Hopon()


def test_knobs_come_as_text() -> None:
    """Numbers, lists of numbers, words."""
    assert make_preset("hopon", {"watermark": "0.25"}) == Hopon(watermark=0.25)
    assert make_preset("static", {"group_size": "3", "max_wait": "inf", "delivery": "stream"}) == Static(
        group_size=3, max_wait=inf, delivery="stream"
    )
    assert make_preset("dynamic", {"preferred_batch_size": "4,8"}) == Dynamic(preferred_batch_size=(4, 8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vlm", r"unknown policy 'vlm'; known: hopon, static, .*module:Class"),
        ("", r"unknown policy ''"),
        ("orca:", r"unknown policy 'orca:'"),
        (":Orca", r"unknown policy ':Orca'"),
        (".orca:Orca", r"unknown policy '.orca:Orca'"),
        ("no_such_module:Policy", r"'no_such_module:Policy': cannot import no_such_module"),
        ("json:Policy", r"json has no dataclass 'Policy'"),
        ("hopon.core.step:Step", r"hopon.core.step has no dataclass 'Step' with a policy method"),
        ("hopon.core.policy.preset:Policy", r"has no dataclass 'Policy' with a policy method"),
    ],
)
def test_an_unknown_policy_is_named(name: str, message: str) -> None:
    """A name that is none, a module that is not there, a class that is no preset."""
    with pytest.raises(ValueError, match=message):
        make_preset(name)


@pytest.mark.parametrize(
    ("name", "knob", "value", "message"),
    [
        ("hopon", "watermrk", "1", r"'hopon' has no knob 'watermrk'; its knobs: watermark"),
        ("nano", "speed", "1", r"'nano' has no knob 'speed'; its knobs: none"),
        ("hopon", "watermark", "much", r"'hopon': knob watermark is a float \(0.01 by default\), got 'much'"),
        ("static", "group_size", "2.5", r"'static': knob group_size is a int \(0 by default\), got '2.5'"),
        ("dynamic", "preferred_batch_size", "4,x", r"'dynamic': knob preferred_batch_size .*got '4,x'"),
        ("static", "max_wait", "nan", r"max_wait must be at least 0 seconds, got nan"),
        ("orca", "reserve", "all", r"reserve must be .*got 'all'"),
    ],
)
def test_a_bad_knob_is_named(name: str, knob: str, value: str, message: str) -> None:
    """A knob that is none, text that is no value, a value out of range."""
    with pytest.raises(ValueError, match=message):
        make_preset(name, {knob: value})


def test_a_knob_without_a_default_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset is usable by name alone, or says which knob has no default."""
    source = (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    size: int\n    def policy(self, config): ...\n"
    )
    (tmp_path / "defaultless.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"'defaultless:P': knob size has no default"):
        make_preset("defaultless:P")
    sys.modules.pop("defaultless")


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_can_be_set_from_text(name: str) -> None:
    """Each default of each system, written out and read again, gives the same preset."""
    texts = {}
    for field in fields(cast(Any, preset_class(name))):
        assert field.default is not MISSING
        assert type(field.default) in (bool, int, float, str, tuple)
        value = field.default
        texts[field.name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    assert make_preset(name, texts) == make_preset(name)


@pytest.mark.parametrize("name", NAMES)
def test_published_settings_are_settings(name: str) -> None:
    """What a system publishes makes a configuration for which it has a policy, made afresh for every scheduler."""
    knobs = {"run_max_tokens": "16"} if name == "hf-pipeline" else {}
    preset = make_preset(name, knobs)
    published: dict[str, Any] = dict(preset.settings(512))
    config = SchedulerConfig(**({"num_blocks": 4096, "max_model_len": 512} | published))
    assert preset.policy(config).composition is not preset.policy(config).composition
    assert make_preset(name, knobs) == preset, "presets with equal knobs are equal"


def test_what_a_server_must_not_use_says_why() -> None:
    """Presets may object to being served; most do not."""
    assert "maximum of all requests" in why_not_serve(make_preset("hf-pipeline", {"run_max_tokens": "9"}))
    assert "give max_wait" in why_not_serve(make_preset("static"))
    assert why_not_serve(make_preset("static", {"max_wait": "0.5"})) == ""
    assert why_not_serve(make_preset("hopon")) == ""
