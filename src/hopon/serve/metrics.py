"""Prometheus metrics, under the names that dashboards for vLLM read (with underscores), plus a few of our own.

Times are seconds on the monotonic clock. Time to first token runs from the arrival of a request at the API process to
the arrival of its first token there. Inter-token latency is every gap between consecutive tokens of one request; tokens
that arrive together have no gap. Gauges and cache counters are the engine's own. Labels have fixed values, never
anything that a client sends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hopon.core.types import FinishReason
from hopon.serve.client import EngineClient

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of one server.

    Args:
        client: where the engine's numbers come from.
        model_name: the label of that name.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, client: EngineClient, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._labels = (model_name, "0")
        self._registry = CollectorRegistry()
        lengths = _lengths(client.config.max_model_len)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were delivered.")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._gap = self._histogram("inter_token_latency_seconds", "Gaps between the tokens of a request.", _GAP)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first seat.", _WHOLE)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._output_length = self._histogram("request_generation_tokens", "Generated tokens per request.", lengths)
        success = Counter(
            "vllm_request_success",
            "Requests by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._finished = {reason: success.labels(*self._labels, reason.value) for reason in FinishReason}
        self._registry.register(_Engine(client, self._labels))

    def first_token(self, arrival: float, admitted: float | None, now: float, num_prompt_tokens: int) -> None:
        """A request got its first token."""
        self._first.observe(now - arrival)
        if admitted is not None:
            self._queue.observe(max(0.0, admitted - arrival))
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_length.observe(num_prompt_tokens)

    def tokens(self, count: int, gap: float | None) -> None:
        """Tokens arrived together; ``gap`` is the time since the one before, None when they are the first."""
        self._generation_tokens.inc(count)
        if gap is not None:
            self._gap.observe(gap)
        for _ in range(count - 1):
            self._gap.observe(0.0)

    def finished(self, reason: FinishReason, arrival: float, now: float, num_tokens: int) -> None:
        """A request ended, in whatever way."""
        self._finished[reason].inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._whole.observe(now - arrival)
            self._output_length.observe(num_tokens)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm_{name}", text, _LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm_{name}", text, _LABELS, registry=self._registry, buckets=buckets)
        return histogram.labels(*self._labels)


class _Engine(Collector):
    """The engine's newest numbers, read when somebody asks."""

    def __init__(self, client: EngineClient, labels: tuple[str, str]) -> None:
        self._client = client
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Gauges, counters and the configuration."""
        client, stats = self._client, self._client.stats
        num_blocks = client.config.num_blocks
        used = stats.num_used_blocks if stats else 0
        yield self._gauge("vllm_num_requests_running", "Requests that hold a seat.", stats.num_running if stats else 0)
        yield self._gauge("vllm_num_requests_waiting", "Requests in the queue.", stats.num_waiting if stats else 0)
        yield self._gauge("vllm_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used / num_blocks)
        oldest = client.oldest_unanswered
        age = 0.0 if oldest is None else max(0.0, time.monotonic() - oldest)
        yield self._gauge("hopon_oldest_unanswered_seconds", "Age of the oldest request without a token.", age)
        for name, text, value in (
            ("vllm_num_preemptions", "Requests that lost their seat.", stats.num_preemptions if stats else 0),
            ("vllm_prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries if stats else 0),
            ("vllm_prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits if stats else 0),
            ("hopon_steps", "Iterations of the engine.", stats.num_steps if stats else 0),
            ("hopon_scheduled_tokens", "Tokens that were computed.", stats.num_scheduled_tokens if stats else 0),
            ("hopon_recomputed_tokens", "Of these, computed again.", stats.num_recomputed_tokens if stats else 0),
            ("hopon_engine_restarts", "Engines that died and were replaced.", client.num_deaths),
            ("hopon_replayed_requests", "Requests given to a new engine after a death.", client.num_replayed_requests),
            ("hopon_replayed_tokens", "Tokens that deaths caused to be computed again.", client.num_replayed_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        config = _texts(client)
        info = GaugeMetricFamily("vllm_cache_config_info", "The engine's settings.", labels=("engine", *config))
        info.add_metric((self._labels[1], *config.values()), 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


def _texts(client: EngineClient) -> Mapping[str, str]:
    """Settings and summary of the engine as label texts."""
    config = client.config
    settings = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,  # the name that dashboards know
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        **{f"hopon_{name}": value for name, value in client.summary.items()},
    }
    return {"".join(c if c.isalnum() else "_" for c in name): str(value) for name, value in settings.items()}


def _lengths(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to a limit."""
    return *(m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e < limit), limit
