"""``hopon capacity``: its flags. What it does is in :mod:`hopon.capacity.command`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hopon.cli.load_flags import (
    SIMULATE,
    ArrivalKind,
    Endpoint,
    Header,
    Mix,
    ModelName,
    ServeFlags,
    Timeout,
    shape_of,
    share_of,
)
from hopon.cli.simulate import Router
from hopon.cli.target import served
from hopon.cli.terminal import progress, say

if TYPE_CHECKING:
    from hopon.capacity.simulated import Simulated


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
    max_windows: Annotated[int, typer.Option(help="Most runs.")] = 80,
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
    from hopon.capacity import command, files
    from hopon.capacity.load import Load, parse_kinds
    from hopon.capacity.promise import parse_promise
    from hopon.core.policy.presets import parse_knobs
    from hopon.workload.draw import Sharing

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
    wanted.plan(promise, start or 1.0)  # refuses what cannot be before a server is started
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
    about |= {"server": server, "flags": serve_flags}  # as given: a server of our own has another port every time
    if resume and json_file is not None:
        files.read(json_file, about)  # refuses another search's before a server is started
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
