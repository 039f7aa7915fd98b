"""``hopon simulate`` and ``hopon calibrate``: plain arguments in, text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hopon.core.config import SchedulerConfig
from hopon.core.policy.preset import Preset
from hopon.core.policy.presets import make_preset
from hopon.metrics import Limits
from hopon.sim import calibrate as calibration
from hopon.sim.cluster import router as make_router
from hopon.sim.cost import Cost, DistServe, Fitted, Linear, Link, Roofline
from hopon.sim.hardware import HARDWARE, MODELS, Hardware, hardware, model
from hopon.sim.report import text
from hopon.sim.result import Result
from hopon.sim.run import simulate as play
from hopon.sim.timeline import Timeline
from hopon.tracing import read_about, read_steps
from hopon.workload.ask import Workload
from hopon.workload.draw import Arrivals, Sharing, draw
from hopon.workload.lengths import parse_lengths
from hopon.workload.skewed import PASS_SECONDS, skewed
from hopon.workload.trace import read_trace

MEMORY_SHARE = 0.9
"""Of a device's memory for weights and KV cache."""

DEFAULTS: Mapping[str, int | bool] = {"block_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
"""Settings where neither the user nor the policy has any."""

_ARTICLE_TOKENS = 439_453
_ARTICLE_KV_BYTES = 131_072


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A cost model and the memory it comes with."""

    cost: Cost
    capacity_tokens: int
    kv_bytes_per_token: int
    max_model_len: int | None
    note: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the scheduler that a fitted model was measured with."""
    overhead: float = 0.0
    """Seconds by which a client of the measured server saw first tokens later than its engine made them."""
    paces: tuple[float, ...] = ()
    """Of the measured server; see :func:`hopon.sim.calibrate.paces`."""

    def with_blocks(self, block_size: int, device: Hardware) -> Cost:
        """The cost model, moves of blocks of this size included."""
        link = Link(
            block_bytes=self.kv_bytes_per_token * block_size,
            host_bandwidth=device.host_bandwidth * device.host_efficiency,
            copy_bandwidth=device.bandwidth * device.bandwidth_efficiency,
        )
        return replace(self.cost, link=link)  # type: ignore[type-var]


def make_machine(cost: str, model_name: str, device: Hardware, captured: Sequence[int] = ()) -> Machine:
    """A cost model by name: ``passes``, ``linear``, ``distserve``, ``roofline`` or ``fitted:PATH``.

    Raises:
        ValueError: unknown, or a model that does not fit into the memory; names it.
        OSError: the fitted model cannot be read.
    """
    if captured and cost != "roofline":
        raise ValueError(f"captured batch sizes belong to the cost model roofline, not to {cost!r}")
    kind, _, path = cost.partition(":")
    match kind:
        case "passes":
            return Machine(
                cost=Linear(base=PASS_SECONDS, per_sequence=0.0, per_prompt_token=0.0),
                capacity_tokens=_ARTICLE_TOKENS,
                kv_bytes_per_token=_ARTICLE_KV_BYTES,
                max_model_len=None,
                note=f"passes: every pass takes {1000 * PASS_SECONDS:g} ms, whatever it computes",
            )
        case "linear":
            note = "linear: 22 ms + 0.35 ms per sequence + 60 ms per 1,000 prompt tokens"
            return Machine(
                cost=Linear(),
                capacity_tokens=_ARTICLE_TOKENS,
                kv_bytes_per_token=_ARTICLE_KV_BYTES,
                max_model_len=None,
                note=note,
            )
        case "distserve":
            opt, a100 = MODELS["opt-13b"], HARDWARE["a100-80"]
            return Machine(
                cost=DistServe(),
                capacity_tokens=int((MEMORY_SHARE * a100.memory - opt.weight_bytes) / opt.kv_bytes_per_token),
                kv_bytes_per_token=opt.kv_bytes_per_token,
                max_model_len=opt.max_model_len,
                note="distserve: published coefficients of OPT-13B on one A100-80",
            )
        case "roofline":
            shape = model(model_name)
            room = MEMORY_SHARE * device.memory - shape.weight_bytes
            capacity = int(room / shape.kv_bytes_per_token)
            if capacity < 1:
                raise ValueError(
                    f"{model_name} has {shape.weight_bytes:,} bytes of weights, and {MEMORY_SHARE:.0%} of the "
                    f"memory are {MEMORY_SHARE * device.memory:,.0f}"
                )
            sizes = f", captured batch sizes {','.join(map(str, captured))}" if captured else ""
            return Machine(
                cost=Roofline(model=shape, hardware=device, captured=tuple(captured)),
                capacity_tokens=capacity,
                kv_bytes_per_token=shape.kv_bytes_per_token,
                max_model_len=shape.max_model_len,
                note=f"roofline: {model_name}, {device.flops_efficiency:.0%} of peak and "
                f"{device.bandwidth_efficiency:.0%} of bandwidth ({device.source}){sizes}",
            )
        case "fitted" if path:
            saved = calibration.read(Path(path))
            return Machine(
                cost=saved.cost,
                capacity_tokens=saved.capacity_tokens,
                kv_bytes_per_token=saved.kv_bytes_per_token,
                max_model_len=saved.settings.get("max_model_len"),
                note=f"fitted to step records: {path}",
                settings={n: v for n, v in saved.settings.items() if n not in ("num_blocks", "max_model_len")},
                overhead=saved.overhead,
                paces=saved.paces,
            )
        case _:
            raise ValueError(f"unknown cost model {cost!r}; known: passes, linear, distserve, roofline, fitted:PATH")


def make_config(
    preset: Preset, machine: Machine, workload: Workload, asked: Mapping[str, int | bool | None]
) -> SchedulerConfig:
    """Settings: what the user asks for wins over what the policy's system publishes, and that over the defaults, which
    are those of the measured server where the cost model is fitted to one.

    The longest context is the model's, or that of the workload where the cost model names no model or the user's limits
    stay below it.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    longest = machine.max_model_len or workload.longest
    usual = longest if machine.settings else min(longest, max(workload.longest, 2))
    max_model_len = int(given.pop("max_model_len", usual))
    settings = dict(DEFAULTS) | dict(machine.settings) | dict(preset.settings(max_model_len)) | given
    num_blocks = machine.capacity_tokens // int(settings["block_size"])
    settings = {"num_blocks": num_blocks, "max_model_len": max_model_len} | settings
    return SchedulerConfig(**settings)  # type: ignore[arg-type]


def simulate(
    *,
    policy: str = "hopon",
    knobs: Mapping[str, str] | None = None,
    trace: Path | None = None,
    num_requests: int | None = None,
    skew: float | None = None,
    arrivals: Arrivals = "poisson",
    rate: float = 4.0,
    variation: float = 1.0,
    input_len: str = "512",
    output_len: str = "exp:128:1536",
    prefix_groups: int = 0,
    prefix_len: int = 0,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    max_tokens: int | None = None,
    cost: str = "roofline",
    model: str = "llama-3-8b",
    hardware_name: str = "a100-80",
    captured: Sequence[int] = (),
    replicas: int = 1,
    router: str = "least-load",
    depth: int = 1,
    settings: Mapping[str, int | bool | None] | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    itl: float | None = None,
    e2e: float | None = None,
    seed: int = 0,
    fast: bool = False,
    json_path: Path | None = None,
    timeline: Timeline | None = None,
    found: Callable[[Result], None] | None = None,
) -> str:
    """Simulate a policy and return what people want to read; everything goes to ``json_path``.

    Args:
        policy: name of a preset or module:Class.
        knobs: its knobs, as text.
        trace: a file; without one the workload is drawn.
        num_requests: first so many of a trace (all), or how many to draw (1,000; with ``skew`` 64).
        skew: draw lengths and arrivals as :func:`hopon.workload.skewed.skewed` does; what says how to draw is ignored.
        arrivals: how requests are spaced when drawn.
        rate: drawn requests per second; 0 for all at once.
        variation: coefficient of variation of gamma gaps.
        input_len: lengths of drawn prompts; see :func:`hopon.workload.lengths.parse_lengths`.
        output_len: the same for outputs.
        prefix_groups: shared beginnings of drawn prompts; 0 for none.
        prefix_len: their length.
        rate_scale: arrivals so many times as fast.
        length_scale: lengths times this.
        max_tokens: limit that every user gives; None: exactly the true length.
        cost: ``passes``, ``linear``, ``distserve``, ``roofline`` or ``fitted:PATH``.
        model: for the roofline.
        hardware_name: for the roofline and for what moving blocks costs.
        captured: batch sizes captured beforehand, for the roofline.
        replicas: engines behind a router.
        router: which one.
        depth: submitted steps that may be unfinished when the next is planned.
        settings: of the scheduler; None leaves one to the policy and the machine.
        ttft: limit for goodput, seconds; so are the next three.
        tpot: time per output token.
        itl: largest gap.
        e2e: to the last token.
        seed: of everything that is drawn.
        fast: merge decode steps between events.
        json_path: where all of the result goes.
        timeline: notes every step.
        found: gets the result.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: a file cannot be read or written.
    """
    result = _simulate(
        policy=policy,
        knobs=knobs or {},
        workload=_workload(
            trace=trace,
            num_requests=num_requests,
            skew=skew,
            arrivals=arrivals,
            rate=rate,
            variation=variation,
            input_len=input_len,
            output_len=output_len,
            sharing=Sharing(groups=prefix_groups, tokens=prefix_len) if prefix_groups or prefix_len else None,
            seed=seed,
        ).scaled(rate_scale, length_scale),
        max_tokens=max_tokens,
        cost=cost,
        model_name=model,
        device=hardware(hardware_name),
        captured=captured,
        replicas=replicas,
        router=router,
        depth=depth,
        settings=settings or {},
        limits=Limits(ttft=ttft, tpot=tpot, itl=itl, e2e=e2e),
        seed=seed,
        fast=fast,
        timeline=timeline,
    )
    if json_path is not None:
        json_path.write_text(result.to_json(), encoding="utf-8")
    if found is not None:
        found(result)
    return text(result)


def _workload(
    *,
    trace: Path | None,
    num_requests: int | None,
    skew: float | None,
    arrivals: Arrivals,
    rate: float,
    variation: float,
    input_len: str,
    output_len: str,
    sharing: Sharing | None,
    seed: int,
) -> Workload:
    if trace is not None:
        workload = read_trace(trace, seed)
        return workload if num_requests is None else workload.first(num_requests)
    if skew is not None:
        return skewed(count=64 if num_requests is None else num_requests, skew=skew, seed=seed)
    return draw(
        count=1000 if num_requests is None else num_requests,
        rate=rate,
        inputs=parse_lengths(input_len),
        outputs=parse_lengths(output_len),
        arrivals=arrivals,
        variation=variation,
        sharing=sharing,
        seed=seed,
    )


def _simulate(
    *,
    policy: str,
    knobs: Mapping[str, str],
    workload: Workload,
    max_tokens: int | None,
    cost: str,
    model_name: str,
    device: Hardware,
    captured: Sequence[int],
    replicas: int,
    router: str,
    depth: int,
    settings: Mapping[str, int | bool | None],
    limits: Limits,
    seed: int,
    fast: bool,
    timeline: Timeline | None,
) -> Result:
    if max_tokens is not None:
        workload = workload.limited(max_tokens)
    preset = make_preset(policy, knobs)
    machine = make_machine(cost, model_name, device, captured)
    config = make_config(preset, machine, workload, settings)
    about: dict[str, Any] = {
        "policy": policy + "".join(f" {name}={value}" for name, value in knobs.items()),
        "workload": "; ".join((f"{len(workload)} requests: {workload.name}", *workload.notes)),
        "cost": machine.note,
        "replicas": f"{replicas}" + (f" behind a {router} router" if replicas > 1 else ""),
        "mode": "fast: decode steps between events are merged" if fast else "exact",
        "depth": depth,
        "seed": seed,
        "settings": asdict(config),
        "limits": asdict(limits),
    }
    return play(
        workload,
        config,
        preset.policy,
        machine.with_blocks(config.block_size, device),
        replicas=replicas,
        router=make_router(router) if replicas > 1 else None,
        depth=depth,
        limits=limits if any(asdict(limits).values()) else None,
        block_bytes=machine.kv_bytes_per_token * config.block_size,
        fast=fast,
        about=about,
        timeline=timeline,
    )


def calibrate(*, steps: Path, output: Path | None, capacity_tokens: int | None, kv_bytes_per_token: int | None) -> str:
    """Fit a cost model to step records and say how wrong it is; ``simulate --cost fitted:OUTPUT`` takes it.

    Args:
        steps: what :class:`hopon.tracing.StepFile` wrote.
        output: where the model goes; None only prints.
        capacity_tokens: KV cache of the machine it was measured on; None: as the file says.
        kv_bytes_per_token: of its model; None: as the file says.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: a file cannot be read or written.
    """
    found = calibration.calibrate(calibration.with_gaps(read_steps(steps)))
    if output is not None:
        saved = saved_model(found.cost, steps, capacity_tokens, kv_bytes_per_token)
        calibration.write(output, saved, found)
    return str(found)


def saved_model(
    cost: Fitted, steps: Path, capacity_tokens: int | None = None, kv_bytes_per_token: int | None = None
) -> calibration.Saved:
    """A fitted model with what the file of steps says of its machine.

    Raises:
        ValueError: it does not say enough.
    """
    about = read_about(steps)
    settings, summary = about.get("config", {}), about.get("summary", {})
    if capacity_tokens is None and settings:
        capacity_tokens = settings["num_blocks"] * settings["block_size"]
    if kv_bytes_per_token is None:
        kv_bytes_per_token = summary.get("kv_bytes_per_token")
    if capacity_tokens is None or kv_bytes_per_token is None:
        raise ValueError(f"{steps} does not tell the size of the KV cache: give capacity_tokens and kv_bytes_per_token")
    return calibration.Saved(
        cost=cost, capacity_tokens=capacity_tokens, kv_bytes_per_token=kv_bytes_per_token, settings=settings
    )
