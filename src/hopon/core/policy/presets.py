"""The table of named systems, and how a name becomes a preset.

Anybody can write a preset: a frozen dataclass with the two methods of :class:`Preset`, named as ``module:Class`` where
a system's name is expected.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, cast

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.policy.preset import Policy, Preset

_SYSTEMS = "hopon.core.policy.systems."

PRESETS: Mapping[str, str] = {
    "hopon": _SYSTEMS + "hopon:Hopon",
    "static": _SYSTEMS + "static:Static",
    "static-impatient": _SYSTEMS + "static:StaticImpatient",
    "hf-pipeline": _SYSTEMS + "static:HfPipeline",
    "dynamic": _SYSTEMS + "dynamic:Dynamic",
    "orca": _SYSTEMS + "orca:Orca",
    "vllm-v0": _SYSTEMS + "vllm:VllmV0",
    "vllm": _SYSTEMS + "vllm:Vllm",
    "sarathi": _SYSTEMS + "sarathi:Sarathi",
    "splitfuse": _SYSTEMS + "splitfuse:SplitFuse",
    "lightllm": _SYSTEMS + "lightllm:LightLlm",
    "lightllm-mixed": _SYSTEMS + "lightllm:LightLlmMixed",
    "lightllm-splitfuse": _SYSTEMS + "lightllm:LightLlmSplitFuse",
    "tgi": _SYSTEMS + "tgi:Tgi",
    "trt-no-evict": _SYSTEMS + "tensorrt:TrtNoEvict",
    "trt-max-utilization": _SYSTEMS + "tensorrt:TrtMaxUtilization",
    "trt-static": _SYSTEMS + "tensorrt:TrtStatic",
    "sglang": _SYSTEMS + "sglang:SgLang",
    "lmdeploy": _SYSTEMS + "lmdeploy:LmDeploy",
    "turbomind": _SYSTEMS + "turbomind:TurboMind",
    "openvino": _SYSTEMS + "openvino:OpenVino",
    "llama-cpp": _SYSTEMS + "llama_cpp:LlamaCpp",
    "nano": _SYSTEMS + "nano:Nano",
}
"""Name -> module:Class."""


def preset_class(name: str) -> type[Preset]:
    """The class behind a system's name or ``module:Class``.

    Raises:
        ValueError: there is none; lists the names.
    """
    module, _, attribute = PRESETS.get(name, name).partition(":")
    if not attribute or not module or module.startswith("."):
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(PRESETS)}, or module:Class of your own")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"policy {name!r}: cannot import {module}: {error}") from error
    if not (isinstance(found, type) and is_dataclass(found) and hasattr(found, "policy")):
        raise ValueError(f"policy {name!r}: {module} has no dataclass {attribute!r} with a policy method")
    return cast(type[Preset], found)


def make_preset(name: str, knobs: Mapping[str, str] | None = None) -> Preset:
    """A preset with some knobs set from text.

    Raises:
        ValueError: unknown policy or knob, or a value that the knob does not take; names it and the choices.
    """
    found = preset_class(name)
    known: dict[str, Field[Any]] = {field.name: field for field in fields(cast(Any, found))}
    for field in known.values():
        if field.default is MISSING:
            raise ValueError(f"policy {name!r}: knob {field.name} has no default, and every knob needs one")
    values = {}
    for knob, text in (knobs or {}).items():
        if knob not in known:
            raise ValueError(f"policy {name!r} has no knob {knob!r}; its knobs: {', '.join(known) or 'none'}")
        values[knob] = _parse(name, known[knob], text)
    return found(**values)


def why_not_serve(preset: Preset) -> str:
    """Why a server must not use this preset, as an attribute of this name says; empty where it may."""
    return str(getattr(preset, "why_not_serve", ""))


def policy_of(options: EngineOptions, config: SchedulerConfig) -> Policy:
    """The policy that the options name, for a resolved config. Raises ValueError as :func:`make_preset` does."""
    policy = make_preset(options.policy, dict(options.policy_knobs)).policy(config)
    return policy if options.delivery is None else replace(policy, delivery=options.delivery)


def engine_options(given: Mapping[str, Any], context_length: Callable[[], int]) -> EngineOptions:
    """What is given wins over what the policy's system publishes, and that over the general defaults.

    Args:
        given: fields of EngineOptions; None is not given.
        context_length: of the model; asked only where a policy is named and no ``max_model_len`` is given.

    Raises:
        ValueError: as :func:`make_preset` does, and for options that exclude each other.
    """
    values = {name: value for name, value in given.items() if value is not None}
    settings: Mapping[str, int | bool] = {}
    if "policy" in values:
        preset = make_preset(values["policy"], dict(values.get("policy_knobs", ())))
        settings = preset.settings(values.get("max_model_len") or context_length())
    chosen: dict[str, Any] = dict(settings) | values
    if "max_num_batched_tokens" not in chosen:  # a step has room for a token of everybody
        default = EngineOptions(model="")
        seats = chosen.get("max_num_seqs", default.max_num_seqs)
        chosen["max_num_batched_tokens"] = max(seats, default.max_num_batched_tokens)
    return EngineOptions(**chosen)


def parse_knobs(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Knobs from ``NAME=VALUE`` words. Raises ValueError for a word of another form and for a name that comes twice."""
    knobs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ValueError(f"a knob is given as NAME=VALUE, got {word!r}")
        if name in knobs:
            raise ValueError(f"knob {name} is given twice: {knobs[name]!r} and {value!r}")
        knobs[name] = value
    return tuple(knobs.items())


def _parse(policy: str, field: Field[Any], text: str) -> Any:
    """A knob's value from text; the type is that of its default."""
    default = field.default
    try:
        match default:
            case bool():
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            case int():
                return int(text)
            case float():
                return float(text)
            case tuple():
                return tuple(int(part) for part in text.split(",") if part)
            case _:
                return text
    except (ValueError, KeyError):
        kind = type(default).__name__
        raise ValueError(
            f"policy {policy!r}: knob {field.name} is a {kind} ({default!r} by default), got {text!r}"
        ) from None
