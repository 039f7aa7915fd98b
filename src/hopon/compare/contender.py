"""Who is compared: policies with their knobs, and the settings that each of them gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.policy.presets import engine_options, make_preset, parse_knobs, policy_of, preset_class
from hopon.workload.ask import Workload

DEFAULT_FULL_REQUESTS = 64
"""Longest requests that the KV cache holds where its size is not given."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy and the knobs that are set."""

    policy: str
    knobs: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """As it was asked for: ``static group_size=8``."""
        return " ".join([self.policy, *map("=".join, self.knobs)])


def parse_policies(names: str, specs: Sequence[str]) -> list[Contender]:
    """Contenders from ``a,b,c`` (names only) and from specs such as ``static group_size=8``, in this order.

    Raises:
        ValueError: none at all, one that comes twice, an unknown name or knob, or a bad value.
    """
    found = [Contender(name.strip()) for name in names.split(",") if name.strip()]
    for contender in found:
        if "=" in contender.policy or " " in contender.policy:
            raise ValueError(f"a list of policies holds names only, got {contender.policy!r}: knobs belong to --policy")
    for spec in specs:
        policy, *words = spec.split() or [""]
        found.append(Contender(policy, parse_knobs(words)))
    if not found:
        raise ValueError("no policies to compare")
    for place, contender in enumerate(found):
        make_preset(contender.policy, dict(contender.knobs))
        if contender in found[:place]:
            raise ValueError(f"policy {contender.label!r} is given twice")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One contender, ready to run: its options and the settings that they resolve to."""

    contender: Contender
    options: EngineOptions
    config: SchedulerConfig

    @property
    def executor_options(self) -> EngineOptions:
        """What an executor depends on."""
        return replace(self.options, policy="hopon", policy_knobs=(), delivery=None)


def make_plan(
    contender: Contender,
    given: Mapping[str, Any],
    workload: Workload,
    *,
    context_length: int,
    kv_tokens: int | None = None,
    host_tokens: int = 0,
) -> Plan:
    """Settings of one contender. All contenders get the same memory, whatever their block size.

    Args:
        contender: a policy and knobs. A knob ``run_max_tokens`` that is not set gets the workload's longest output.
        given: fields of EngineOptions that hold for all contenders; None is not given.
        workload: its longest request is the longest that there can be, unless ``max_model_len`` is given.
        context_length: of the model.
        kv_tokens: size of the KV cache; None for 64 of the longest requests.
        host_tokens: size of the host tier.

    Raises:
        ValueError: settings that cannot work together, or that the policy cannot work with; names policy and numbers.
    """
    knobs = contender.knobs
    known = {field.name for field in fields(cast(Any, preset_class(contender.policy)))}
    if "run_max_tokens" in known and "run_max_tokens" not in dict(knobs):
        knobs += (("run_max_tokens", str(max(workload.output_lengths))),)
    length = given.get("max_model_len") or min(context_length, max(workload.longest, 2))
    named = {"policy": contender.policy, "policy_knobs": knobs, "max_model_len": length}
    try:
        options = engine_options({**given, **named}, lambda: context_length)
        tokens = DEFAULT_FULL_REQUESTS * length if kv_tokens is None else kv_tokens
        size = options.block_size
        options = replace(options, num_kv_blocks=tokens // size, num_host_blocks=host_tokens // size)
        config = SchedulerConfig(
            num_blocks=tokens // size,
            **{f.name: getattr(options, f.name) for f in fields(SchedulerConfig) if f.name != "num_blocks"},
        )
        policy_of(options, config)
    except ValueError as error:
        raise ValueError(f"{contender.label}: {error}") from error
    return Plan(contender=contender, options=options, config=config)
