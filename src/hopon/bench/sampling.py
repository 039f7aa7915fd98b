"""A server's own numbers, read from its Prometheus page under the names that each engine gives them."""

from __future__ import annotations

import re

from hopon.bench.records import Sample

NAMES = {
    "waiting": (
        "vllm_num_requests_waiting",
        "sglang_num_queue_reqs",
        "tgi_queue_size",
        "llamacpp_requests_deferred",
        "lmdeploy_num_requests_waiting",
    ),
    "running": (
        "vllm_num_requests_running",
        "sglang_num_running_reqs",
        "tgi_batch_current_size",
        "llamacpp_requests_processing",
        "lmdeploy_num_requests_running",
    ),
    "kv_usage": (
        "vllm_kv_cache_usage_perc",
        "vllm_gpu_cache_usage_perc",
        "sglang_token_usage",
        "llamacpp_kv_cache_usage_ratio",
        "lmdeploy_gpu_cache_usage_perc",
    ),
    "recomputed_tokens": ("hopon_recomputed_tokens_total",),
    "computed_tokens": ("hopon_scheduled_tokens_total",),
    "preemptions": ("vllm_num_preemptions_total", "vllm_num_preemptions", "sglang_num_retracted_requests_total"),
}
"""Metrics by engine; a colon in a name is read as an underscore, since both spellings are about."""

_OWNER = {name: quantity for quantity, names in NAMES.items() for name in names}
_LINE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}\n]*\})? +([0-9.eE+-]+)", re.MULTILINE)
_INFO = re.compile(rb"^vllm[:_]cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"')


def read_sample(page: bytes, time: float) -> Sample:
    """Numbers of one page; replicas and label sets are added up, shares of a cache averaged."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(page):
        quantity = _OWNER.get(name.decode().replace(":", "_"))
        if quantity is not None:
            found.setdefault(quantity, []).append(float(value))
    totals = {quantity: sum(values) for quantity, values in found.items()}
    if "kv_usage" in totals:
        totals["kv_usage"] /= len(found["kv_usage"])
    return Sample(time=time, **totals)


def read_settings(page: bytes) -> dict[str, str]:
    """Settings that a server tells as labels of ``vllm_cache_config_info``; empty where there are none."""
    line = _INFO.search(page)
    return dict(_LABEL.findall(line[1].decode(errors="replace"))) if line else {}
