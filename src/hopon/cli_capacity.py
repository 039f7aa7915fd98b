"""``hopon capacity``, ``calibrate`` and ``plan``: their flags. What they do is in :mod:`hopon.capacity`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hopon.cli_bench import Endpoint, Header, ModelName, ServeFlags, Timeout, progress, say, served
from hopon.cli_simulate import ArrivalKind, Router

if TYPE_CHECKING:
    from hopon.capacity.simulated import Simulated


class Mix(StrEnum):
    """What is asked."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    MIXED = "mixed"


SIMULATE = "simulate"


def capacity(
    server: Annotated[
        str | None,
        typer.Argument(help="A server's address, or a model that hopon serves itself; none with --target simulate."),
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            help="The promise: 'ttft<500ms tpot<60ms', by class 'short: ttft<1s; long-answer: e2e<30s', or of "
            "percentiles 'ttft_p95<500ms'."
        ),
    ] = "ttft<1s tpot<100ms",
    attain: Annotated[str, typer.Option(help="Share of the requests that must keep all of it: 95% or 0.95.")] = "95%",
    workload: Annotated[Mix, typer.Option(help="What is asked.")] = Mix.RANDOM,
    input_len: Annotated[
        str, typer.Option(help="Prompt tokens: 512, 32-256, exp:MEAN:MAX, lognormal:MEAN:VARIATION:MAX.")
    ] = "128",
    output_len: Annotated[str, typer.Option(help="The same for answers.")] = "64",
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="'NAME WEIGHT IN OUT'", help="A class of a mix of your own; several times."),
    ] = None,
    prefix_groups: Annotated[int, typer.Option(help="Shared beginnings of prompts.")] = 0,
    prefix_len: Annotated[int, typer.Option(help="Their length in tokens.")] = 0,
    arrivals: Annotated[ArrivalKind, typer.Option(help="Spacing of requests.")] = ArrivalKind.POISSON,
    variation: Annotated[float, typer.Option(help="Coefficient of variation of gamma gaps.")] = 1.0,
    target: Annotated[
        str | None, typer.Option(help="simulate: ask the simulator instead of a server; it also says where to begin.")
    ] = None,
    start: Annotated[float | None, typer.Option(help="First rate. (Default: from a short saturating run.)")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Length of a run; the first quarter is not counted. (Default: so that it counts 100 requests, "
            "between 10 and 40 s.)"
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="On a server: all runs together take no longer.")] = 9.0,
    half_width: Annotated[float, typer.Option(help="Of the interval that is asked for, as a share.")] = 0.1,
    max_windows: Annotated[int, typer.Option(help="Most runs.")] = 40,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="All that was measured, written after every run.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A page with the curves and the limit.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in the --json file.")] = False,
    endpoint: Annotated[Endpoint, typer.Option(help="Completions or chat.")] = Endpoint.COMPLETIONS,
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    model_name: ModelName = "",
    header: Header = None,
    timeout: Timeout = 600.0,
    serve_flags: ServeFlags = "",
    policy: Annotated[str, typer.Option(help="Simulator: a policy by name.")] = "hopon",
    policy_knob: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Simulator: a knob.")] = None,
    cost: Annotated[
        str,
        typer.Option(
            help="Simulator: step times: linear, distserve, roofline or fitted:FILE; with fitted and a server, it says "
            "where the search begins."
        ),
    ] = "roofline",
    model: Annotated[
        str, typer.Option(help="Simulator: a built-in name or a config.json, for the roofline.")
    ] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="Simulator: for the roofline.")] = "a100-80",
    replicas: Annotated[int, typer.Option(help="Simulator: engines behind a router.")] = 1,
    router: Annotated[Router, typer.Option(help="Simulator: which router.")] = Router.LEAST_LOAD,
    max_num_seqs: Annotated[int | None, typer.Option(help="Simulator: seats.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Simulator: tokens of a step.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Simulator: KV blocks.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Simulator: tokens of a block.")] = None,
    overhead: Annotated[
        float | None,
        typer.Option(help="Simulator: seconds that HTTP adds to each answer. (Default: as fitted, else 0.)"),
    ] = None,
) -> None:
    """Find the highest load at which users still get what was promised, with an interval, and what breaks first."""
    from hopon.bench.schedule import Writer
    from hopon.capacity import command
    from hopon.capacity.load import Load, parse_kinds
    from hopon.capacity.promise import parse_promise
    from hopon.core.policy.presets import parse_knobs
    from hopon.workload import Sharing

    if target not in (None, SIMULATE):
        raise typer.BadParameter(f"--target is simulate or nothing, got {target!r}")
    if (target is None) == (server is None):
        raise typer.BadParameter("give a server's address or a model, or --target simulate")
    if resume and json_file is None:
        raise typer.BadParameter("--resume needs the --json file of the search")
    for name, path in (("--json", json_file), ("--html", html_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{name} {path}: no such folder")
    load = Load(
        kinds=parse_kinds(workload.value, classes or (), input_len, output_len),
        arrivals=arrivals.value,
        variation=variation,
        sharing=Sharing(groups=prefix_groups, tokens=prefix_len) if prefix_groups or prefix_len else None,
    )
    promise = parse_promise(slo, share_of(attain))
    names = {kind.name for kind in load.kinds}
    for name in promise.slo.kinds if promise.slo else ():
        if name not in names:
            raise ValueError(f"--slo names a class {name!r}; the workload has {', '.join(sorted(names)) or 'none'}")
    wanted = command.Wanted(
        start=start,
        seconds=seconds,
        minutes=None if target == SIMULATE else minutes,
        half_width=half_width,
        max_windows=max_windows,
        seed=seed,
        json_file=json_file,
        html_file=html_file,
        resume=resume,
    )
    about: dict[str, Any] = {
        "promise": f"{slo} for {attain} of the requests" if promise.slo else slo,
        "workload": "; ".join(classes) if classes else shape_of(workload, input_len, output_len),
        "prefixes": f"{prefix_groups} of {prefix_len} tokens" if prefix_groups else "",
        "arrivals": arrivals.value + (f", variation {variation:g}" if arrivals is ArrivalKind.GAMMA else ""),
        "runs": (f"{seconds:g} s each" if seconds else "100 requests each") + ", the first quarter not counted",
    }

    def simulate() -> Simulated:
        return command.make_simulated(
            load=load,
            promise=promise,
            policy=policy,
            knobs=dict(parse_knobs(policy_knob or ())),
            settings={
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "num_blocks": num_blocks,
                "block_size": block_size,
            },
            cost=cost,
            model=model,
            hardware_name=hardware,
            replicas=replicas,
            router=router.value,
            overhead=overhead,
        )

    if target == SIMULATE:
        simulated = simulate()
        about["simulated"] = f"{policy}, {replicas} replica{'s' * (replicas > 1)}, {cost}"
        about["settings"] = ", ".join(f"{name} {value}" for name, value in simulated.settings().items())
        print(command.run_simulated(simulated, wanted, about, f"{policy} on {cost}", say))
        return
    assert server is not None, "checked above"
    is_chat = endpoint is Endpoint.CHAT
    common = {"model": model_name, "chat": is_chat, "timeout": timeout}
    about |= {"flags": serve_flags}
    with served(server, serve_flags, header, common) as found, progress("window") as watch:
        writer = Writer(as_text=is_chat, lowest=min(100, vocab_size // 4), vocab_size=vocab_size)
        try:
            predicting = simulate() if cost.startswith("fitted:") else None
            print(
                command.run_live(
                    found, load, promise, wanted, writer, about, say=say, watch=watch, simulated=predicting
                )
            )
        except KeyboardInterrupt:
            kept = f"; what was measured is in {json_file}, --resume goes on" if json_file else ""
            say(f"ended early{kept}")
            sys.exit(130)


def share_of(text: str) -> float:
    """A share of requests, as it is written."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"--attain is a share such as 95% or 0.95, got {text!r}") from None


def shape_of(workload: Mix, input_len: str, output_len: str) -> str:
    """The workload in words."""
    return f"{input_len} tokens in, {output_len} out" if workload is Mix.RANDOM else workload.value


def calibrate(
    what: Annotated[str, typer.Argument(help="A file of `serve --step-records`, or a model that is then served.")],
    output: Annotated[Path | None, typer.Option(help="Where the fitted model goes.")] = None,
    capacity_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache, if the file does not say.")] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="Of the model, if the file does not say.")] = None,
    slo: Annotated[str, typer.Option(help="Whose capacity the loads of the comparison are shares of.")] = (
        "ttft<1s tpot<100ms"
    ),
    input_len: Annotated[str, typer.Option(help="Prompt tokens of the comparison.")] = "32-160",
    output_len: Annotated[str, typer.Option(help="Answer tokens of the comparison.")] = "exp:40:120",
    seconds: Annotated[float, typer.Option(help="Length of each run.")] = 8.0,
    repeats: Annotated[int, typer.Option(help="Runs at each load of the comparison.")] = 3,
    policy: Annotated[str, typer.Option(help="The server's policy.")] = "hopon",
    policy_knob: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A knob of it.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    serve_flags: ServeFlags = "",
) -> None:
    """Fit the simulator's step times to a real engine; of a model also say how well it then predicts other runs."""
    import asyncio
    import shlex
    import tempfile

    from hopon.bench.command import named
    from hopon.bench.schedule import Writer
    from hopon.capacity import calibrate as live
    from hopon.capacity.load import Load, parse_kinds
    from hopon.core.policy.presets import parse_knobs
    from hopon.sim import calibrate as calibration
    from hopon.sim.command import calibrate as fit

    if Path(what).is_file() and not what.endswith(".gguf"):
        print(
            fit(
                steps=Path(what),
                output=output,
                capacity_tokens=capacity_tokens,
                kv_bytes_per_token=kv_bytes_per_token,
            )
        )
        return
    knobs = policy_knob or []
    flags = [serve_flags, f"--policy {policy}", *(f"--policy-knob {shlex.quote(knob)}" for knob in knobs)]
    load = Load(kinds=parse_kinds("random", (), input_len, output_len))
    writer = Writer(lowest=min(100, vocab_size // 4), vocab_size=vocab_size)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        steps = Path(folder) / "steps.jsonl"
        with served(what, " ".join((*flags, f"--step-records {steps}")), None, {}) as server:
            server = runner.run(named(server))
            live.measure_steps(server, writer, runner, seconds, say)
            found, saved = live.fit(steps)
            print(found)
            saved, text = live.predict_and_compare(
                server,
                writer,
                runner,
                steps,
                saved,
                load,
                policy=policy,
                knobs=dict(parse_knobs(knobs)),
                slo=slo,
                seconds=seconds,
                repeats=repeats,
                say=say,
            )
            print(text)
    if output is not None:
        calibration.write(output, saved, found)


def plan(
    slo: Annotated[str, typer.Option(help="The promise, as for `hopon capacity`.")],
    model: Annotated[str, typer.Option(help="A built-in name or a config.json.")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="Hardware of each replica, by name.")] = "h100",
    trace: Annotated[
        Path | None, typer.Option(help="The traffic: CSV arrival_s,input_tokens,output_tokens, Azure's or Mooncake's.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second: of a drawn traffic, or what a trace is scaled to.")
    ] = None,
    num_requests: Annotated[int, typer.Option(help="So many: drawn, or the busiest of a trace in a row.")] = 2000,
    input_len: Annotated[str, typer.Option(help="Prompt tokens of a drawn traffic.")] = "lognormal:1000:1:8000",
    output_len: Annotated[str, typer.Option(help="Answer tokens of a drawn traffic.")] = "lognormal:250:0.8:2000",
    attain: Annotated[str, typer.Option(help="Share of the requests that must keep all of it.")] = "95%",
    policy: Annotated[str, typer.Option(help="Preset of each engine.")] = "hopon",
    router: Annotated[list[Router] | None, typer.Option(help="Routers to try. (Default: all.)")] = None,
    max_num_seqs: Annotated[str, typer.Option(help="Seats to try.")] = "128,256",
    max_num_batched_tokens: Annotated[str, typer.Option(help="Token budgets to try.")] = "512,2048,8192",
    max_replicas: Annotated[int, typer.Option(help="More are not tried.")] = 64,
    seed: Annotated[int, typer.Option(help="Of a drawn traffic.")] = 0,
) -> None:
    """Predict how many replicas, at which settings, carry a given traffic as promised. A prediction, and it says so."""
    from hopon.capacity import plan as planning
    from hopon.capacity.promise import parse_promise
    from hopon.sim.hardware import hardware
    from hopon.workload import draw, parse_lengths, read_trace

    if trace is None:
        if rate is None:
            raise typer.BadParameter("give --trace, or --rate for a drawn traffic")
        inputs, outputs = parse_lengths(input_len), parse_lengths(output_len)
        traffic = draw(count=num_requests, rate=rate, inputs=inputs, outputs=outputs, seed=seed)
    else:
        traffic = read_trace(trace, seed)
        if rate is not None:
            span = traffic.asks[-1].arrival - traffic.asks[0].arrival
            if not span:
                raise ValueError(f"{trace}: all requests arrive at once, which no factor scales to {rate:g} per second")
            traffic = traffic.scaled(rate * span / (len(traffic) - 1))
        traffic = traffic.busiest(num_requests)
    site = planning.Site(
        traffic=traffic,
        promise=parse_promise(slo, share_of(attain)),
        model=model,
        hardware=hardware(gpu),
        policy=policy,
        max_replicas=max_replicas,
    )
    ladder = {"max_num_seqs": _numbers(max_num_seqs), "max_num_batched_tokens": _numbers(max_num_batched_tokens)}
    routers = [one.value for one in router or Router]
    say(f"{len(traffic)} requests: {traffic.name}; {'; '.join(traffic.notes)}".rstrip("; "))
    print(planning.plan(site, routers, ladder, say))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"numbers are given as 128,256, got {text!r}") from None
