"""The ``hopon`` command: the one place that reads the environment and wires the parts together.

Imports of parts happen inside the commands, so that ``hopon --help`` is quick and ``hopon serve`` starts its engine
process before it loads anything else.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hopon
from hopon.cli_bench import bench, probe
from hopon.cli_capacity import calibrate, capacity, plan
from hopon.cli_lab import lab as lab_command
from hopon.cli_reproduce import policies, reproduce
from hopon.cli_simulate import simulate
from hopon.cli_tune import tune
from hopon.core.config import EngineOptions

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from hopon.core.types import SamplingParams
    from hopon.hub import Progress
    from hopon.jsonl import Line
    from hopon.llm import LLM, Prompt, RequestOutput
    from hopon.serve.server import ReadyServer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(bench)
app.command()(probe)
app.command()(capacity)
app.command()(plan)
app.command()(tune)
app.command()(simulate)
app.command()(calibrate)
app.command()(policies)

_DEFAULTS = EngineOptions(model="")


class Delivery(StrEnum):
    """When answers are told."""

    STREAM = "stream"
    BATCH = "batch"


class FairShare(StrEnum):
    """Between whom the engine is shared fairly."""

    NONE = "none"
    KEY = "key"
    USER = "user"


class LogFormat(StrEnum):
    """Of a line per request."""

    NONE = "none"
    TEXT = "text"
    JSON = "json"


class SamplingDefaults(StrEnum):
    """Where sampling fields come from that a request leaves open."""

    MODEL = "model"
    NEUTRAL = "neutral"


def parse_bytes(text: str) -> int:
    """A number of bytes: ``536870912``, ``512MiB``, ``2GiB``, ``1.5GB``.

    Raises:
        typer.BadParameter: names the text and the units.
    """
    units = {"": 1, "b": 1}
    units |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
    units |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", text.strip().lower())
    if parts is None or parts[2] not in units:
        raise typer.BadParameter(f"expected bytes, or a number with KiB, MiB, GiB, KB, MB or GB, got {text!r}")
    return int(float(parts[1]) * units[parts[2]])


def _setting(name: str, text: str, *flags: str) -> Any:
    """A flag that the policy has a word in: not given, its system's value counts, else the general one."""
    default = getattr(_DEFAULTS, name)
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return typer.Option(*flags, help=f"{text} (Default: the policy's own, else {shown}.)")


Model = Annotated[
    str, typer.Argument(help="A catalogue name, a .gguf file, a model's folder, or a hub id: org/repo[:file.gguf].")
]
Dtype = Annotated[str, typer.Option(help="Arithmetic of the weights: auto, f32, bf16, q8 or q4.")]
KvCacheDtype = Annotated[str, typer.Option(help="Numbers in the KV cache: auto, f32, f16 or bf16.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0 for one per core.")]
Level = Annotated[str | None, typer.Option(help="Force kernels: amx, avx512, avx2 or portable (default: best).")]
MaxNumSeqs = Annotated[int | None, _setting("max_num_seqs", "Most sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, _setting("max_num_batched_tokens", "Most tokens that one step computes.")]
LongPrefillTokenThreshold = Annotated[
    int | None, _setting("long_prefill_token_threshold", "Largest chunk of one prompt in a step; 0 for no limit.")
]
BlockSize = Annotated[int | None, _setting("block_size", "Tokens per KV block: 1, 2, 4, 8 or a multiple of 16.")]
NumHostBlocks = Annotated[
    int | None, _setting("num_host_blocks", "KV blocks in a host tier that preempted sequences can be moved to.")
]
EnablePrefixCaching = Annotated[
    bool | None,
    _setting(
        "enable_prefix_caching", "Reuse KV of equal prefixes.", "--enable-prefix-caching/--no-enable-prefix-caching"
    ),
]
EnableChunkedPrefill = Annotated[
    bool | None,
    _setting(
        "enable_chunked_prefill",
        "Spread prompts over steps.",
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output (default: what model and KV cache allow).")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where models and packed weights are kept (default: $HOPON_CACHE or ~/.cache/hopon)."),
]


def main() -> None:
    """Run the command line; an error is one line on stderr and a non-zero status."""
    from hopon.catalogue import HashMismatchError, ModelNotFoundError

    sys.path.append(str(Path.cwd()))  # for policies of one's own, module:Class; last, so that nothing is shadowed
    try:
        app()
    except (ModelNotFoundError, HashMismatchError, ValueError, OSError) as error:
        sys.exit(f"hopon: {' '.join(str(error).split()) or type(error).__name__}")


def cache_root() -> Path:
    """Root of hopon's cache: ``$HOPON_CACHE``, else the default one."""
    from hopon.catalogue import DEFAULT_CACHE

    return Path(os.environ.get("HOPON_CACHE") or DEFAULT_CACHE).expanduser()


app.command()(reproduce(cache_root))
app.command("lab")(lab_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hopon {hopon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continuous batching for language models on CPUs."""


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A catalogue name, or a hub id: org/repo or org/repo:file.gguf.")],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, unless it is on disk; prints its path."""
    from hopon.catalogue import resolve

    with _download_bar() as progress:
        path = resolve(model, cache_dir or cache_root(), progress, refresh=True)
    print(path)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name for clients (default: as given); may be given several times.")
    ] = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    threads: Threads = 0,
    level: Level = None,
    policy: Annotated[
        str | None, typer.Option(help="Batching system: a preset's name, or module:Class. (Default: hopon.)")
    ] = None,
    policy_knob: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A knob of the policy; may be given several times.")
    ] = None,
    delivery: Annotated[
        Delivery | None,
        typer.Option(help="Tell tokens as they come, or when the batch ends. (Default: as the policy does.)"),
    ] = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    long_prefill_token_threshold: LongPrefillTokenThreshold = None,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = None,
    kv_cache_memory: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Size of the KV cache, such as 512MiB or 2GiB."),
    ] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="Size of the KV cache in blocks.")] = None,
    num_host_blocks: NumHostBlocks = None,
    enable_prefix_caching: EnablePrefixCaching = None,
    enable_chunked_prefill: EnableChunkedPrefill = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer of another .gguf file or folder (default: the model's).")
    ] = None,
    sampling_defaults: Annotated[
        SamplingDefaults,
        typer.Option(help="What a request leaves open: the model's generation_config.json, or neutral values."),
    ] = SamplingDefaults.MODEL,
    max_queued_requests: Annotated[
        int | None,
        typer.Option(help="Most requests that wait for a seat; more get a 429. (Default: 16 per seat, at least 1024.)"),
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens that wait. (Default: 32 times the KV cache.)")
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(parser=parse_bytes, metavar="BYTES", help="Longest request body. (Default: 16MiB.)"),
    ] = None,
    queue_timeout: Annotated[float, typer.Option(help="Longest wait for a seat, in seconds; 0 for no limit.")] = 600.0,
    request_timeout: Annotated[
        float, typer.Option(help="Longest time from arrival to the end, in seconds; 0 for no limit.")
    ] = 0.0,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which an engine that completes no step is replaced; 0: never.")
    ] = 0.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that open requests have to end after a SIGTERM.")
    ] = 25.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; may be given several times. (Also: $HOPON_API_KEY, --api-key-file.)"
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of keys, one a line.")] = None,
    isolate_keys: Annotated[
        bool, typer.Option("--isolate-keys", help="Share cached prefixes per API key only.")
    ] = False,
    step_time_target: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=1.0,
            help="Milliseconds that a step should take at most: prompts get smaller chunks for it.",
        ),
    ] = None,
    fair_share: Annotated[
        FairShare, typer.Option(help="Share the engine fairly between API keys, or `user` values of requests.")
    ] = FairShare.NONE,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Web pages that may call (CORS); may be given several times. (Default: none.)"
        ),
    ] = None,
    metrics_colon_names: Annotated[
        bool, typer.Option("--metrics-colon-names", help="Metrics are called vllm:name, not vllm_name.")
    ] = False,
    request_traces: Annotated[
        bool, typer.Option("--request-traces", help="Keep the newest requests' lives for GET /v1/requests/ID/trace.")
    ] = False,
    lab: Annotated[
        bool, typer.Option("--lab", help="A page at /lab that shows the running engine: seats, queue, latencies.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="A line per request on stderr.")] = LogFormat.TEXT,
    step_records: Annotated[
        Path | None, typer.Option(help="A file for what each step computed and took, for `hopon calibrate`.")
    ] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    from hopon.catalogue import resolve
    from hopon.core.policy.presets import engine_options, make_preset, parse_knobs, why_not_serve

    knobs = parse_knobs(policy_knob or ())
    if fair_share is not FairShare.NONE:
        knobs = (*knobs, ("fair_share", "true"))
    if step_time_target is not None:
        knobs = (*knobs, ("step_time_target", str(step_time_target / 1000)))
    name = policy or _DEFAULTS.policy
    reason = why_not_serve(make_preset(name, dict(knobs)))
    if reason:
        raise ValueError(f"policy {name} cannot serve: {reason}")
    root = cache_dir or cache_root()
    with _download_bar() as progress:
        path = resolve(model, root, progress)
    given = {
        "model": str(path),
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "threads": threads,
        "level": level,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "kv_cache_memory": kv_cache_memory,
        "num_host_blocks": num_host_blocks,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "cache_dir": str(root),
        "policy": policy,
        "policy_knobs": knobs,
        "delivery": None if delivery is None else delivery.value,
        "step_records": None if step_records is None else str(step_records.absolute()),
    }
    engine = engine_options(given, lambda: _context_length(path))
    from hopon.serve.server import ServerOptions, run_server

    options = ServerOptions(
        factory="hopon.model.cpu:load",
        engine=engine,
        # A path is a poor name, so that the server makes one of it; what is not a path is the name.
        served_model_names=tuple(served_model_name or (() if Path(model).exists() else (model,))),
        host=host,
        port=port,
        sampling_defaults=sampling_defaults.value,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        max_body_bytes=16 << 20 if max_body_bytes is None else max_body_bytes,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        step_timeout=step_timeout,
        drain_timeout=drain_timeout,
        api_keys=_api_keys(api_key or (), api_key_file),
        isolate_keys=isolate_keys,
        fair_share=fair_share.value,
        allowed_origins=tuple(allowed_origins or ()),
        log_format=log_format.value,
        metrics_colon_names=metrics_colon_names,
        request_traces=request_traces,
        lab_page=_lab_page(name) if lab else "",
    )
    loading = _LoadingLine()
    sys.exit(
        run_server(
            options, on_ready=lambda ready: loading.replace(_introduction(ready, engine)), on_progress=loading.show
        )
    )


def _lab_page(policy: str) -> str:
    from hopon.lab.page import render
    from hopon.lab.play import about_policy

    return render("live", about_policy(policy, policy))


@app.command()
def compare(
    model: Model,
    policies: Annotated[str, typer.Option(help="Policies with their default knobs: a,b,c.")] = "",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help='A policy with knobs, such as "static group_size=8"; may be given several times.'
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="A trace (CSV, Azure, Mooncake), or what to draw: "
            '"input=32-256 output=exp:32:128 arrivals=gamma variation=2 groups=4 prefix=64".',
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests to draw (default 32), or the first of a trace.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; 0 sends all at once. (Default: 0, a trace as recorded.)")
    ] = None,
    length_scale: Annotated[float, typer.Option(help="Prompts and outputs so many times as long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for all that was measured.")] = None,
    html: Annotated[Path | None, typer.Option(help="A page with the picture of the runs.")] = None,
    png: Annotated[Path | None, typer.Option(help="A still of that page; needs Chromium.")] = None,
    delivery: Annotated[
        Delivery | None,
        typer.Option(help="Tell tokens as they come, or when the batch ends. (Default: as each policy does.)"),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV cache of every policy, in tokens. (Default: 64 of the longest requests.)")
    ] = None,
    host_tokens: Annotated[int, typer.Option(help="Host tier of every policy, in tokens.")] = 0,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    threads: Threads = 0,
    level: Level = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    long_prefill_token_threshold: LongPrefillTokenThreshold = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output. (Default: the workload's longest.)")
    ] = None,
    block_size: BlockSize = None,
    enable_prefix_caching: EnablePrefixCaching = None,
    enable_chunked_prefill: EnableChunkedPrefill = None,
    cache_dir: CacheDir = None,
) -> None:
    """Run several policies on the same requests and print one table."""
    from hopon import compare as comparing
    from hopon.catalogue import resolve
    from hopon.lab.files import Picture
    from hopon.lab.play import about_policy

    picture = Picture(html, png)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {json_file}: no such folder")
    contenders = comparing.parse_policies(policies, policy or ())
    work = comparing.make_workload(
        workload or comparing.DEFAULT_WORKLOAD, requests=requests, rate=rate, length_scale=length_scale, seed=seed
    )
    root = cache_dir or cache_root()
    with _download_bar() as progress:
        path = resolve(model, root, progress)
    from hopon.model.cpu import load
    from hopon.model.source import open_source

    facts = open_source(path).config
    given = {
        "model": str(path),
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "threads": threads,
        "level": level,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "cache_dir": str(root),
        "delivery": None if delivery is None else delivery.value,
    }
    line = _LoadingLine()
    comparison = comparing.compare(
        contenders=contenders,
        given=given,
        workload=work,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        factory=load,
        report=line.show,
        with_timelines=picture.wanted,
    )
    line.replace(comparison.text())
    if json_file is not None:
        json_file.write_text(comparison.to_json(), encoding="utf-8")
    runs = [about_policy(o.label.split()[0], o.label) | o.timeline for o in comparison.outcomes if o.timeline]
    if picture.wanted and runs:
        picture.write(str(comparison.manifest["workload"]), runs, clock="measured")
    if comparison.missing:
        sys.exit(130)
    if comparison.differing:
        sys.exit("hopon: policies gave different outputs")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One prompt; the answer goes to stdout.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="A file of prompts, one JSON string or object a line.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="A new file for the answers, one JSON object a line.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer tokens of prompt and answer again.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0: fewer tokens of the answer again.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time that a token occurred.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Write log-probabilities to --output.")] = None,
    dtype: Dtype = "auto",
    threads: Threads = 0,
    level: Level = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    cache_dir: CacheDir = None,
) -> None:
    """Answer one prompt, or a file of prompts, without a server."""
    from hopon.core.types import SamplingParams

    if (prompt is None) == (input_file is None):
        raise typer.BadParameter("give either -p or --input")
    if (input_file is None) != (output_file is None):
        raise typer.BadParameter("--input and --output belong together")
    if chat and prompt is None:
        raise typer.BadParameter("--chat belongs to -p; in a file a line with messages is a conversation")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        seed=seed,
        logprobs=logprobs,
    )
    # Before the model is loaded, so that a bad file is told at once.
    lines = _read_lines(input_file, output_file, params) if input_file is not None else []
    from hopon.llm import LLM

    with _download_bar() as progress:
        llm = LLM(
            model,
            dtype=dtype,
            threads=threads,
            level=level,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            cache_dir=cache_dir or cache_root(),
            progress=progress,
        )
    with llm:
        if output_file is not None:
            _answer_file(llm, lines, output_file)
        elif prompt is not None:
            message = {"role": "user", "content": prompt}
            [output] = llm.chat([message], params) if chat else llm.generate(prompt, params)
            print(output.outputs[0].text)


def _context_length(model: Path) -> int:
    from hopon.model.source import open_source

    return open_source(model).config.context_length


def _api_keys(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """Keys from the command line, the environment and a file."""
    keys = list(given)
    if os.environ.get("HOPON_API_KEY"):
        keys.append(os.environ["HOPON_API_KEY"])
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file}: there is no key in it")
        keys += found
    return tuple(keys)


def _read_lines(source: Path, target: Path | None, params: SamplingParams) -> list[Line]:
    from hopon.jsonl import read_lines

    if target is not None and target.exists():
        raise FileExistsError(f"{target} exists and may hold answers; name another file")
    return read_lines(source, params)


def _answer_file(llm: LLM, lines: list[Line], target: Path) -> None:
    """Answer all lines into a new file; ends with status 1 when some could not be answered."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from hopon.jsonl import AnswerFile, answer

    prompts: list[Prompt] = []
    for line in lines:
        if line.messages is None:
            assert line.prompt is not None, "a line has a prompt or messages"
            prompts.append(line.prompt)
            continue
        try:
            prompts.append(llm.tokenizer.encode_chat(line.messages))
        except ValueError as error:
            raise ValueError(f"line {line.number}: {error}") from error
    refused: list[int] = []
    num_answered = 0
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with AnswerFile(target) as answers, Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(lines))

        def write(index: int, output: RequestOutput) -> None:
            nonlocal num_answered
            num_answered += 1
            if output.error:
                refused.append(lines[index].number)
            answers.add(index, answer(lines[index], output))
            bar.advance(task)

        try:
            llm.answer_each(prompts, [line.params for line in lines], write)
        except KeyboardInterrupt:
            bar.stop()
            sys.exit(f"hopon: interrupted; {num_answered} of {len(lines)} answers are in {target}")
    if refused:
        sys.exit(f"hopon: {len(refused)} of {len(lines)} lines could not be answered, the first is line {refused[0]}")


@contextmanager
def _download_bar() -> Iterator[Progress]:
    """A progress bar on stderr that appears, and is imported, with the first news: most starts have none."""
    with ExitStack() as stack:
        bars: list[Bar] = []
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(_new_bar()))
            if what not in tasks:
                tasks[what] = bars[0].add_task(what)
            bars[0].update(tasks[what], completed=done, total=total or None)

        yield progress


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Bar(*columns, console=Console(stderr=True))


class _LoadingLine:
    """What the engine is doing while it loads: one line on a terminal's stderr, nothing elsewhere."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, what: str, share: float) -> None:
        """Overwrite the line."""
        if sys.stderr.isatty():
            text = f"{what}: {share:.0%}"
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def replace(self, text: str) -> None:
        """Put a text where the line was."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
        print(text, flush=True)


def _introduction(ready: ReadyServer, options: EngineOptions) -> str:
    """What runs, with how much memory, and a command that works."""
    facts = ready.summary
    caching = f"on, in whole blocks of {options.block_size} tokens" if options.enable_prefix_caching else "off"
    chunking = f"steps of up to {options.max_num_batched_tokens} tokens"
    if not options.enable_chunked_prefill:
        chunking += ", whole prompts"
    lines = {
        "model": f"{facts['model']} ({facts['family']}, {float(facts['parameters']) / 1e6:,.1f} M parameters)",
        "dtype": f"{facts['dtype']}, {_size(facts['weight_bytes'])} of packed weights",
        "kernels": f"{facts['level']} ({facts['level_reason']}), threads: {facts['threads']}",
        "KV cache": f"{_size(facts['kv_bytes'])} of {facts['kv_cache_dtype']} = {facts['kv_tokens']:,} tokens = "
        f"{facts['full_length_requests']:,} requests of the full length, {facts['max_model_len']:,} tokens",
        "batching": f"up to {options.max_num_seqs} sequences at once, {chunking}",
        "prefix caching": caching,
    }
    if options.policy != _DEFAULTS.policy or options.policy_knobs or options.delivery:
        told = f" (delivery: {options.delivery})" if options.delivery else ""
        lines = {"policy": " ".join([options.policy, *map("=".join, options.policy_knobs)]) + told} | lines
    notes = [f"  note: {notice}" for notice in ready.notices]
    return "\n".join(
        [
            f"hopon {hopon.__version__} serves {', '.join(ready.model_names)} at {ready.url}",
            *(f"  {name + ':':<16}{text}" for name, text in lines.items()),
            *notes,
            "Try:",
            f"  {ready.curl()}",
        ]
    )


def _size(value: str | int | float) -> str:
    """A number of bytes for people."""
    num_bytes = float(value)
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
