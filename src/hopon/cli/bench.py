"""``hopon bench``: its flags. What it does is in :mod:`hopon.bench.command`."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hopon.cli.load_flags import ArrivalKind, Endpoint, Header, ModelName, ServeFlags, Timeout
from hopon.cli.target import served, target_of
from hopon.cli.terminal import progress, say


class WorkloadKind(StrEnum):
    """What is asked."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    MIXED = "mixed"
    CONVERSATIONS = "conversations"


class Cache(StrEnum):
    """Whether prompts are new to the server."""

    COLD = "cold"
    WARM = "warm"


class Capacity(StrEnum):
    """What a provider gives."""

    SHARED = "shared"
    RESERVED = "reserved"


def bench(
    server: Annotated[
        str | None, typer.Argument(help="A server's address, or a model that hopon then serves itself.")
    ] = None,
    workload: Annotated[WorkloadKind, typer.Option(help="What is asked.")] = WorkloadKind.RANDOM,
    input_len: Annotated[
        str, typer.Option(help="Prompt tokens: 512, 32-256, exp:MEAN:MAX, lognormal:MEAN:VARIATION:MAX.")
    ] = "512",
    output_len: Annotated[str, typer.Option(help="The same for answers.")] = "128",
    prefix_groups: Annotated[int, typer.Option(help="Shared beginnings of prompts.")] = 0,
    prefix_len: Annotated[int, typer.Option(help="Their length in tokens.")] = 0,
    turns: Annotated[str, typer.Option(help="Turns of each conversation.")] = "2-5",
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and the next turn.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and times of a trace: arrival_s,... CSV, Azure's or Mooncake's.")
    ] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="Prompts, one JSON string or object a line.")] = None,
    length_scale: Annotated[float, typer.Option(help="Lengths so many times as long.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests (or conversations) per second; 0 sends all at once.")
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="A trace's own times so many times as fast.")] = 1.0,
    arrivals: Annotated[ArrivalKind | None, typer.Option(help="Spacing. (Default: poisson.)")] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of gamma gaps: 1 is Poisson, below 1 burstier, above 1 steadier.")
    ] = None,
    ramp_to: Annotated[float | None, typer.Option(help="The rate moves on a straight line to this one.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: so many at once.")] = None,
    num_requests: Annotated[int | None, typer.Option(help="How many. (Default: 100, all of a trace.)")] = None,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds of sending. An open loop then waits for the answers, a closed one cuts them."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    cache: Annotated[
        Cache,
        typer.Option(help="cold: every run has prompts of its own. warm: the seed's, so that a repeat finds them."),
    ] = Cache.COLD,
    warmup: Annotated[int, typer.Option(help="Short requests before the run; they are not measured.")] = 1,
    endpoint: Annotated[Endpoint, typer.Option(help="Completions or chat.")] = Endpoint.COMPLETIONS,
    text: Annotated[
        bool, typer.Option("--text", help="Send prompts as text instead of token ids; chats always do.")
    ] = (False),
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Insist on the length of answers.")
    ] = True,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; -1 leaves it to the server.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help="A JSON object of further fields of every request.")] = "{}",
    model_name: ModelName = "",
    header: Header = None,
    timeout: Timeout = 600.0,
    slo: Annotated[
        str, typer.Option(help="Promise for goodput: 'ttft<500ms tpot<60ms', or 'short: ttft<1s; long-answer: ...'.")
    ] = "",
    against: Annotated[str | None, typer.Option(help="A second server: windows alternate between both.")] = None,
    windows: Annotated[int, typer.Option(help="Windows for each of the two.")] = 5,
    capacity_kind: Annotated[Capacity | None, typer.Option(help="Of a provider, for the record.")] = None,
    hardware: Annotated[str, typer.Option(help="The server's hardware, for the record.")] = "",
    serve_flags: ServeFlags = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for all that was measured.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="No run: two files of --json side by side.")] = None,
) -> None:
    """Measure a server under a load: throughput, latencies, goodput, errors."""
    from hopon.bench import command, report
    from hopon.bench.manifest import Declared

    if compare is not None:
        print(command.compare_files(compare))
        return
    if server is None:
        raise typer.BadParameter("give a server's address or a model (or --compare with two files)")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {json_file}: no such folder")
    if arrivals is None:
        arrivals = ArrivalKind.POISSON if burstiness is None else ArrivalKind.GAMMA
    elif burstiness is not None and arrivals is not ArrivalKind.GAMMA:
        raise typer.BadParameter(f"--burstiness belongs to gamma arrivals, not to {arrivals.value}")
    is_chat = endpoint is Endpoint.CHAT
    asked = command.Asked(
        workload=workload.value,
        input_len=input_len,
        output_len=output_len,
        prefix_groups=prefix_groups,
        prefix_len=prefix_len,
        turns=turns,
        think=think,
        trace=trace,
        prompts_file=prompts_file,
        length_scale=length_scale,
        rate=rate,
        rate_scale=rate_scale,
        arrivals=arrivals.value,
        burstiness=1.0 if burstiness is None else burstiness,
        ramp_to=ramp_to,
        concurrency=concurrency,
        num_requests=num_requests,
        duration=duration,
        seed=seed,
        cache=cache.value,
        vocab_size=vocab_size,
        warmup=warmup,
        as_text=text or is_chat or workload is WorkloadKind.CONVERSATIONS,
        slo=slo,
    )
    command.make_slo(asked)
    common = {
        "model": model_name,
        "chat": is_chat,
        "ignore_eos": ignore_eos,
        "temperature": None if temperature == -1 else temperature,
        "fields": _object(extra_body),
        "timeout": timeout,
    }
    declared = Declared(
        command=shlex.join(["hopon", *sys.argv[1:]]),
        serve_flags=tuple(shlex.split(serve_flags)),
        server_hardware=hardware,
        capacity=capacity_kind.value if capacity_kind else "",
    )
    _allow_many_connections()
    with served(server, serve_flags, header, common) as target, progress(asked.load) as watch:
        if against is not None:
            second = target_of(against, header, common)

            async def both(stop: asyncio.Event) -> tuple[str, dict[str, Any], bool]:
                text, content = await command.alternate(
                    (target, second), asked, declared, windows=windows, stop=stop, watch=watch, say=say
                )
                return text, content, stop.is_set()

            shown, content, interrupted = command.run(both)
            failed = False
        else:

            async def one(stop: asyncio.Event) -> command.Measured:
                return await command.measure(target, asked, declared, stop=stop, watch=watch)

            measured: command.Measured = command.run(one)
            shown, content = measured.text, dict(measured.content)
            interrupted = measured.records.interrupted
            failed = not any(call.completed for call in measured.records.calls)
    print(shown)
    if json_file is not None:
        report.write(json_file, content)
    if interrupted:
        sys.exit(130)
    if failed:
        sys.exit("hopon: no request was answered")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"--extra-body takes a JSON object, got {text!r}")
    return value


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: a connection is one."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
