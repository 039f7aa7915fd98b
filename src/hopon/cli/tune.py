"""``hopon tune``: its flags. What it does is in :mod:`hopon.capacity.tune_command`."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hopon.cli.load_flags import SIMULATE, ArrivalKind, Mix, ServeFlags, Timeout, shape_of, share_of
from hopon.cli.target import served
from hopon.cli.terminal import progress, say

if TYPE_CHECKING:
    from hopon.bench.target import Target
    from hopon.capacity.knobs import Candidate


def tune(
    server: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="What hopon serves; none with --target simulate.")
    ] = None,
    slo: Annotated[str, typer.Option(help="The promise, as for `hopon capacity`.")] = "ttft<1s tpot<100ms",
    attain: Annotated[str, typer.Option(help="Share of the requests that must keep all of it.")] = "95%",
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=A,B,C",
            help="Turn this knob only, through these values; several times. (Default: max-num-seqs, "
            "max-num-batched-tokens, long-prefill-token-threshold, num-kv-blocks and policy, around their values.)",
        ),
    ] = None,
    base: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Where to start from; several times.")
    ] = None,
    raise_knob: Annotated[
        str, typer.Option("--raise", metavar="NAME", help="Only raise this knob, until --until breaks.")
    ] = "",
    until: Annotated[str, typer.Option(help="The promise for --raise: 'ttft_p95<500ms'.")] = "",
    workload: Annotated[Mix, typer.Option(help="What is asked.")] = Mix.RANDOM,
    input_len: Annotated[str, typer.Option(help="Prompt tokens, as for `hopon capacity`.")] = "128",
    output_len: Annotated[str, typer.Option(help="The same for answers.")] = "64",
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="'NAME WEIGHT IN OUT'", help="A class of a mix of your own; several times."),
    ] = None,
    arrivals: Annotated[ArrivalKind, typer.Option(help="Spacing of requests.")] = ArrivalKind.POISSON,
    variation: Annotated[float, typer.Option(help="Coefficient of variation of gamma gaps.")] = 1.0,
    target: Annotated[str | None, typer.Option(help="simulate: ask the simulator only.")] = None,
    cost: Annotated[
        str, typer.Option(help="Step times: fitted:FILE of `hopon calibrate`; linear, distserve or roofline.")
    ] = "roofline",
    model: Annotated[str, typer.Option(help="For the roofline: a built-in name or a config.json.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="For the roofline.")] = "a100-80",
    rate: Annotated[
        float | None, typer.Option(help="Requests per second on the engine. (Default: near the simulated limits.)")
    ] = None,
    best: Annotated[int, typer.Option(help="So many candidates are measured.")] = 3,
    rounds: Annotated[int, typer.Option(help="Windows of each of them.")] = 3,
    seconds: Annotated[float, typer.Option(help="Length of a window; the first quarter is not counted.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="All that was measured, written after every window.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="A page with throughput against latency.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the tuning in the --json file.")] = False,
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    timeout: Timeout = 600.0,
    serve_flags: ServeFlags = "",
) -> None:
    """Find the flags that carry most load: the simulator tries them all, the engine the best few."""
    from hopon.bench.schedule import Writer
    from hopon.capacity import tune_command as command
    from hopon.capacity.knobs import KNOBS, Candidate, parse_knob
    from hopon.capacity.load import Load, parse_kinds
    from hopon.capacity.promise import parse_promise
    from hopon.capacity.trials import Trials

    if target not in (None, SIMULATE):
        raise typer.BadParameter(f"--target is simulate or nothing, got {target!r}")
    if (target is None) == (server is None):
        raise typer.BadParameter("give a model, or --target simulate")
    if server is not None and server.startswith(("http://", "https://")):
        raise typer.BadParameter("the engine must be started with other flags: give a model, not an address")
    if server is not None and not cost.startswith("fitted:"):
        raise typer.BadParameter("a model of your own needs its step times: --cost fitted:FILE of `hopon calibrate`")
    if bool(raise_knob) != bool(until):
        raise typer.BadParameter("--raise and --until belong together")
    if resume and json_file is None:
        raise typer.BadParameter("--resume needs the --json file of the tuning")
    for flag, number in (("--best", best), ("--rounds", rounds), ("--seconds", seconds)):
        if number <= 0:
            raise typer.BadParameter(f"{flag} must be above 0, got {number:g}")
    if rate is not None and rate <= 0:
        raise typer.BadParameter(f"--rate must be above 0, got {rate:g}")
    for name, path in (("--json", json_file), ("--html", html_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{name} {path}: no such folder")
    known = {"--" + name.replace("_", "-") for name in KNOBS}
    for word in shlex.split(serve_flags):
        if word.partition("=")[0] in known:
            raise typer.BadParameter(f"{word} is a knob: --base {word.removeprefix('--').partition('=')[0]}=VALUE")
    raised = parse_knob(f"{raise_knob}=1")[0] if raise_knob else ""
    start = {}
    for text in base or ():
        name, values = parse_knob(text)
        if len(values) != 1:
            raise ValueError(f"--base has one value of each knob, got {text!r}")
        start[name] = values[0]
    wanted = command.Wanted(
        base=Candidate.of(start),
        knobs=dict(parse_knob(text) for text in knob or ()),
        rate=rate,
        best=best,
        rounds=rounds,
        seconds=seconds,
        seed=seed,
        html_file=html_file,
    )
    promised = until or slo
    site = command.Site(
        load=Load(
            kinds=parse_kinds(workload.value, classes or (), input_len, output_len),
            arrivals=arrivals.value,
            variation=variation,
        ),
        promise=parse_promise(promised, share_of(attain)),
        cost=cost,
        model=model,
        hardware=hardware,
    )
    about: dict[str, Any] = {
        "model": server or (f"{model} on {hardware}, simulated" if cost == "roofline" else "simulated"),
        "promise": f"{promised} for {attain} of the requests" if site.promise.slo else promised,
        "workload": "; ".join(classes) if classes else shape_of(workload, input_len, output_len),
        "arrivals": arrivals.value + (f", variation {variation:g}" if arrivals is ArrivalKind.GAMMA else ""),
        "step times": cost,
        "start": str(wanted.base),
        "flags": serve_flags,
    }
    trials = Trials(about, json_file, resume=resume)
    if len(trials):
        say(f"going on behind {len(trials)} windows")

    @contextmanager
    def serve(candidate: Candidate) -> Iterator[Target]:
        assert server is not None, "checked above"
        flags = " ".join([serve_flags, shlex.join(candidate.flags)])
        with served(server, flags, None, {"timeout": timeout}) as found:
            yield found

    with asyncio.Runner() as runner, progress("window") as watch:
        writer = Writer(lowest=min(100, vocab_size // 4), vocab_size=vocab_size)
        engines = None
        if server is not None:
            engines = command.Engines(serve=serve, writer=writer, runner=runner, watch=watch)
        try:
            if raised:
                print(command.walk(site, engines, wanted, raised, trials, say))
            else:
                print(command.tune(site, engines, wanted, trials, about, say))
        except KeyboardInterrupt:
            kept = f"; what was measured is in {json_file}, --resume goes on" if json_file else ""
            say(f"ended early{kept}")
            sys.exit(130)
