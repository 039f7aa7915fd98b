"""``hopon serve``: its flags, and what it says when the server is ready.

Imports of parts happen inside the command, so that the engine process is started before anything else is loaded.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hopon
from hopon.cli.engine_flags import (
    DEFAULTS,
    BlockSize,
    CacheDir,
    Delivery,
    Dtype,
    EnableChunkedPrefill,
    EnablePrefixCaching,
    KvCacheDtype,
    Level,
    LongPrefillTokenThreshold,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumHostBlocks,
    Threads,
    parse_bytes,
)
from hopon.cli.environment import api_keys, cache_root
from hopon.cli.terminal import LoadingLine, download_bar

if TYPE_CHECKING:
    from hopon.core.config import EngineOptions
    from hopon.serve.server import ReadyServer


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
    name = policy or DEFAULTS.policy
    reason = why_not_serve(make_preset(name, dict(knobs)))
    if reason:
        raise ValueError(f"policy {name} cannot serve: {reason}")
    root = cache_dir or cache_root()
    with download_bar() as progress:
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
        api_keys=api_keys(api_key or (), api_key_file),
        isolate_keys=isolate_keys,
        fair_share=fair_share.value,
        allowed_origins=tuple(allowed_origins or ()),
        log_format=log_format.value,
        metrics_colon_names=metrics_colon_names,
        request_traces=request_traces,
        lab_page=_lab_page(name) if lab else "",
    )
    loading = LoadingLine()
    sys.exit(
        run_server(
            options, on_ready=lambda ready: loading.replace(_introduction(ready, engine)), on_progress=loading.show
        )
    )


def _lab_page(policy: str) -> str:
    from hopon.lab.page import render
    from hopon.lab.play import about_policy

    return render("live", about_policy(policy, policy))


def _context_length(model: Path) -> int:
    from hopon.model.source import open_source

    return open_source(model).config.context_length


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
    if options.policy != DEFAULTS.policy or options.policy_knobs or options.delivery:
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
