"""Prometheus metrics, under the names that dashboards for vLLM read (with underscores), plus a few of our own.

Times are seconds on the monotonic clock. Time to first token runs from the arrival of a request at the API process to
the arrival of its first token there. Inter-token latency is every gap between consecutive tokens of one request; tokens
that arrive together have no gap. Gauges and cache counters are the engine's own. Labels have fixed values, never
anything that a client sends.

Numbers are kept as plain Python numbers and become metrics when somebody asks: a token costs an addition and a search.
"""

from __future__ import annotations

import logging
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hopon.core.types import FinishReason
from hopon.serve import wire
from hopon.serve.client import EngineClient
from hopon.serve.limits import Cause, Gate
from hopon.serve.notes import Notes
from hopon.serve.slo import Judgement

_FIRST = tuple(
    map(float, "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560".split())
)
_GAP = tuple(
    map(
        float,
        "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80".split(),
    )
)
_WHOLE = tuple(
    map(
        float,
        "0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680".split(),
    )
)
_STEP = tuple(0.0001 * 2**i for i in range(18))
_POWERS = (1.0, *(8.0 * 2**i for i in range(12)))
_STATUSES = (200, 400, 401, 404, 405, 408, 413, 429, 499, 500, 503, 504)
_LABELS = ("model_name", "engine")

_REJECTIONS = {Cause.REQUESTS: "max_num_queued_reqs", Cause.TOKENS: "max_num_queued_tokens"}
"""vLLM's words."""

OVERCOMMITTED = 0.1
"""Share of computed tokens that had been computed before, from which on memory counts as promised too often."""

WINDOW = 10.0
"""Seconds over which that share is taken."""

WARNING_INTERVAL = 60.0
"""Seconds between two warnings of it."""

log = logging.getLogger("hopon.serve")


class Histogram:
    """Counts of values up to each of some bounds, ascending."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound as text, count up to there), and the sum."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(_text, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found, self._sum


def _text(bound: float) -> str:
    return repr(float(bound))


class Overcommitment:
    """Whether memory is promised too often: how much is computed again because it was taken away."""

    def __init__(self) -> None:
        self._since = 0.0
        self._scheduled = 0
        self._recomputed = 0
        self.share = 0.0
        """Of the last window."""

    @property
    def is_high(self) -> bool:
        """Whether it was too much."""
        return self.share > OVERCOMMITTED

    def look(self, now: float, scheduled: int, recomputed: int) -> None:
        """Totals as of now."""
        if now - self._since < WINDOW:
            return
        new, again = scheduled - self._scheduled, recomputed - self._recomputed
        self.share = again / new if new else 0.0
        self._since, self._scheduled, self._recomputed = now, scheduled, recomputed


class Metrics(Collector):
    """All metrics of one server.

    Args:
        client: where the engine's numbers come from.
        gate: where the queue's come from.
        model_name: the label of that name.
        colon_names: ``vllm:name`` in place of ``vllm_name``.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, client: EngineClient, gate: Gate, model_name: str, *, colon_names: bool = False) -> None:
        self._client = client
        self._gate = gate
        self._labels = (model_name, "0")
        self._colon_names = colon_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        limit = client.config.max_model_len
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._timeouts = {"queue": 0, "request": 0}
        self._statuses: dict[str, int] = dict.fromkeys([*map(str, _STATUSES), "other"], 0)
        self._judged = {True: 0, False: 0}
        self._judged_limits = {(name, met): 0 for name in ("ttft", "tpot", "e2e") for met in (True, False)}
        self._first = Histogram(_FIRST)
        self._gap = Histogram(_GAP)
        self._per_token = Histogram(_GAP)
        self._whole = Histogram(_WHOLE)
        self._queue = Histogram(_WHOLE)
        self._inference = Histogram(_WHOLE)
        self._prefill = Histogram(_WHOLE)
        self._decode = Histogram(_WHOLE)
        self._prompt_length = Histogram(_lengths(limit))
        self._output_length = Histogram(_lengths(limit))
        self._longest_output = Histogram(_lengths(limit))
        self._max_tokens = Histogram(_lengths(limit))
        self._computed_prompt = Histogram(_lengths(limit))
        self._num_outputs = Histogram((1, 2, 5, 10, 20))
        self._step_tokens = Histogram(_POWERS)
        self._step_rows = Histogram(float(2**i) for i in range(11))
        self._step_seconds = Histogram(_STEP)
        self._parts = {"plan": 0.0, "compute": 0.0, "commit": 0.0, "tell": 0.0}
        self._slot_steps = self._useful_slot_steps = 0
        self._notes = Notes()
        self._overcommitment = Overcommitment()
        self._warned = -WARNING_INTERVAL

    # ---- what it hears ----

    def asked(self, num_outputs: int, max_tokens: int) -> None:
        """An HTTP request was let in."""
        self._num_outputs.observe(num_outputs)
        self._max_tokens.observe(max_tokens)

    def first_token(
        self, arrival: float, admitted: float | None, now: float, num_prompt_tokens: int, num_cached: int = 0
    ) -> None:
        """A request got its first token."""
        self._first.observe(now - arrival)
        if admitted is not None:
            self._queue.observe(max(0.0, admitted - arrival))
            self._prefill.observe(max(0.0, now - admitted))
        self._prompt_tokens += num_prompt_tokens
        self._cached_tokens += num_cached
        self._prompt_length.observe(num_prompt_tokens)
        self._computed_prompt.observe(num_prompt_tokens - num_cached)

    def tokens(self, count: int, gap: float | None) -> None:
        """Tokens arrived together; ``gap`` is the time since the one before, None when they are the first."""
        self._generation_tokens += count
        if gap is not None:
            self._gap.observe(gap)
        if count > 1:
            self._gap.observe(0.0, count - 1)

    def finished(
        self,
        reason: FinishReason,
        arrival: float,
        now: float,
        num_tokens: int,
        *,
        admitted: float | None = None,
        first_token: float | None = None,
        last_token: float | None = None,
    ) -> None:
        """A request ended, in whatever way."""
        self._finished[reason] += 1
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._whole.observe(now - arrival)
        self._output_length.observe(num_tokens)
        if admitted is not None:
            self._inference.observe(max(0.0, now - admitted))
        if first_token is not None and last_token is not None:
            self._decode.observe(last_token - first_token)
            if num_tokens > 1:
                self._per_token.observe((last_token - first_token) / (num_tokens - 1))

    def answered(self, longest: int) -> None:
        """All outputs of an HTTP request have ended; ``longest`` is the most tokens that one of them has."""
        self._longest_output.observe(longest)

    def judged(self, judgement: Judgement) -> None:
        """A request with limits of its own has ended."""
        self._judged[judgement.met] += 1
        for name, met in judgement.each.items():
            self._judged_limits[name, met] += 1

    def timed_out(self, limit: str) -> None:
        """A request was ended by a time limit: "queue" or "request"."""
        self._timeouts[limit] += 1

    def responded(self, status: int) -> None:
        """An HTTP request was answered."""
        name = str(status)
        self._statuses[name if name in self._statuses else "other"] += 1

    def heard(self, news: wire.News) -> None:
        """An iteration of the engine."""
        notes = self._notes = news.notes
        if notes.num_rows:
            seconds = notes.seconds
            self._step_rows.observe(notes.num_rows)
            self._step_tokens.observe(notes.num_tokens)
            self._step_seconds.observe(seconds.plan + seconds.compute + seconds.commit + seconds.tell)
            self._slot_steps += notes.num_rows
            self._useful_slot_steps += notes.num_useful_rows
            for name in self._parts:
                self._parts[name] += getattr(seconds, name)

        self._look_at_memory(news.stats.num_scheduled_tokens, news.stats.num_recomputed_tokens)

    def _look_at_memory(self, scheduled: int, recomputed: int) -> None:
        now = time.monotonic()
        self._overcommitment.look(now, scheduled, recomputed)
        if self._overcommitment.is_high and now - self._warned > WARNING_INTERVAL:
            self._warned = now
            log.warning(
                "%.0f %% of the tokens of the last %g s had been computed before: the KV cache is too small for so "
                "many sequences at once; lower --max-num-seqs or raise --kv-cache-memory",
                self._overcommitment.share * 100,
                WINDOW,
            )

    # ---- what it tells ----

    def render(self) -> bytes:
        """The text format."""
        text = generate_latest(self._registry)
        return re.sub(rb"^((?:# \w+ )?)vllm_", rb"\1vllm:", text, flags=re.MULTILINE) if self._colon_names else text

    def collect(self) -> Iterator[Metric]:
        """See base."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        config = _texts(self._client)
        info = GaugeMetricFamily("vllm_cache_config_info", "The engine's settings.", labels=("engine", *config))
        info.add_metric((self._labels[1], *config.values()), 1)
        yield info

    def _gauges(self) -> Iterator[Metric]:
        client, stats, gate = self._client, self._client.stats, self._gate
        now = time.monotonic()
        if stats is not None:
            self._look_at_memory(stats.num_scheduled_tokens, stats.num_recomputed_tokens)
        alive = stats is not None and not client.dead.is_set()
        # What is under way to the engine waits too, and what it has not been told to forget does not run.
        running = min(stats.num_running, client.num_open) if stats is not None and alive else 0
        waiting = client.num_open - running
        used = stats.num_used_blocks if stats is not None and alive else 0
        oldest = client.oldest_unanswered
        memory = self._overcommitment
        for name, text, value in (
            ("vllm_num_requests_running", "Requests that hold a seat.", running),
            ("vllm_num_requests_waiting", "Requests without a seat.", waiting),
            ("vllm_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used / client.config.num_blocks),
            ("hopon_oldest_unanswered_seconds", "Age of the oldest request without a token.", _age(oldest, now)),
            ("hopon_queue_age_seconds", "Age of the oldest request without a seat.", _age(gate.oldest, now)),
            ("hopon_queue_places", "Requests without a seat, as the limits count them.", gate.num_waiting),
            ("hopon_queue_tokens", "Their prompt tokens; bounds for those not yet tokenized.", gate.waiting_tokens),
            ("hopon_queue_places_limit", "max_queued_requests.", gate.limits.max_queued_requests),
            ("hopon_queue_tokens_limit", "max_queued_tokens.", gate.limits.max_queued_tokens),
            ("hopon_drain_requests_per_second", "How fast the queue drains, as measured.", gate.rate.requests),
            ("hopon_seats", "max_num_seqs.", client.config.max_num_seqs),
            ("hopon_overcommitted", f"1 where over {OVERCOMMITTED:.0%} is computed again.", memory.is_high),
            ("hopon_recomputed_share", f"Of the tokens of the last {WINDOW:g} s.", memory.share),
        ):
            yield self._gauge(name, text, float(value))
        reasons = self._notes.waiting
        blocked = reasons if waiting and alive else Notes().waiting
        known = blocked.seats + blocked.tokens + blocked.blocks + blocked.order
        for name, text, counts in (
            ("vllm_num_requests_waiting_by_reason", "Requests without a seat.", {"capacity": waiting, "deferred": 0}),
            (
                "hopon_waiting_requests",
                "What they wait for: seats, tokens of a step, KV blocks, their turn; the engine has not seen the new.",
                {
                    "seats": blocked.seats,
                    "tokens": blocked.tokens,
                    "blocks": blocked.blocks,
                    "order": blocked.order,
                    "new": max(0, waiting - known),
                },
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=(*_LABELS, "reason"))
            for reason, count in counts.items():
                family.add_metric((*self._labels, reason), count)
            yield family

    def _counters(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        for name, text, value in (
            ("vllm_prompt_tokens", "Prompt tokens of requests that got their first token.", self._prompt_tokens),
            ("vllm_prompt_tokens_cached", "Of these, from the prefix cache.", self._cached_tokens),
            ("vllm_generation_tokens", "Tokens that were delivered.", self._generation_tokens),
            ("vllm_num_preemptions", "Requests that lost their seat.", stats.num_preemptions if stats else 0),
            ("vllm_prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries if stats else 0),
            ("vllm_prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits if stats else 0),
            ("hopon_steps", "Iterations of the engine.", stats.num_steps if stats else 0),
            ("hopon_scheduled_tokens", "Tokens that were computed.", stats.num_scheduled_tokens if stats else 0),
            ("hopon_recomputed_tokens", "Of these, computed again.", stats.num_recomputed_tokens if stats else 0),
            ("hopon_engine_restarts", "Engines that died and were replaced.", client.num_deaths),
            ("hopon_replayed_requests", "Requests given to a new engine after a death.", client.num_replayed_requests),
            ("hopon_replayed_tokens", "Tokens that deaths caused to be computed again.", client.num_replayed_tokens),
            ("hopon_busy_seconds", "Time in iterations that computed.", sum(self._parts.values())),
            ("hopon_slot_steps", "Rows of passes, padding included.", self._slot_steps),
            (
                "hopon_useful_slot_steps",
                "Of these, those that gave a token or computed something for the first time.",
                self._useful_slot_steps,
            ),
        ):
            yield self._counter(name, text, {(): value})
        computed = self._prompt_tokens - self._cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": self._cached_tokens, "external_kv_transfer": 0}
        turned_away = self._gate.turned_away
        labelled: tuple[tuple[str, str, tuple[str, ...], Mapping[tuple[str, ...], float]], ...] = (
            (
                "vllm_request_success",
                "Requests by how they ended.",
                ("finished_reason",),
                {(reason.value,): count for reason, count in self._finished.items()},
            ),
            (
                "vllm_prompt_tokens_by_source",
                "Prompt tokens of requests that got their first token.",
                ("source",),
                {(source,): count for source, count in sources.items()},
            ),
            (
                "vllm_admission_rejections",
                "Requests that were turned away.",
                ("reason",),
                {(word,): turned_away[cause] for cause, word in _REJECTIONS.items()},
            ),
            (
                "hopon_refusals",
                "Requests that were turned away, every output counted.",
                ("reason",),
                {(cause.value,): count for cause, count in turned_away.items()},
            ),
            (
                "hopon_timeouts",
                "Requests that a time limit has ended.",
                ("limit",),
                {(limit,): count for limit, count in self._timeouts.items()},
            ),
            (
                "hopon_http_responses",
                "By status; 499: the client left first.",
                ("status",),
                {(status,): count for status, count in self._statuses.items()},
            ),
            (
                "hopon_slo_requests",
                "Requests with limits of their own, by whether all were met: the goodput is the rate of those.",
                ("met",),
                {(_word(met),): count for met, count in self._judged.items()},
            ),
            (
                "hopon_slo_limits",
                "The same for each limit.",
                ("limit", "met"),
                {(name, _word(met)): count for (name, met), count in self._judged_limits.items()},
            ),
            (
                "hopon_step_part_seconds",
                "Where the time of iterations went.",
                ("part",),
                {(part,): seconds for part, seconds in self._parts.items()},
            ),
        )
        for name, text, labels, values in labelled:
            yield self._counter(name, text, values, labels)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("vllm_time_to_first_token_seconds", "From arrival to the first token.", self._first),
            ("vllm_inter_token_latency_seconds", "Gaps between the tokens of a request.", self._gap),
            ("vllm_request_time_per_output_token_seconds", "Mean gap of a request.", self._per_token),
            ("vllm_e2e_request_latency_seconds", "From arrival to the last token.", self._whole),
            ("vllm_request_queue_time_seconds", "From arrival to the first seat.", self._queue),
            ("vllm_request_inference_time_seconds", "From the first seat to the end.", self._inference),
            ("vllm_request_prefill_time_seconds", "From the first seat to the first token.", self._prefill),
            ("vllm_request_decode_time_seconds", "From the first token to the last.", self._decode),
            ("vllm_request_prompt_tokens", "Prompt tokens per request.", self._prompt_length),
            ("vllm_request_generation_tokens", "Generated tokens per request.", self._output_length),
            ("vllm_request_max_num_generation_tokens", "Tokens of the longest output.", self._longest_output),
            ("vllm_request_params_max_tokens", "Most tokens that were asked for.", self._max_tokens),
            ("vllm_request_params_n", "Outputs that were asked for.", self._num_outputs),
            ("vllm_request_prefill_kv_computed_tokens", "Prompt tokens without cached ones.", self._computed_prompt),
            ("vllm_iteration_tokens_total", "Tokens per iteration.", self._step_tokens),
            ("hopon_batch_size", "Rows per iteration.", self._step_rows),
            ("hopon_step_seconds", "Time per iteration that computed.", self._step_seconds),
        ):
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            buckets, total = histogram.buckets()
            family.add_metric(self._labels, buckets, total)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()
    ) -> CounterMetricFamily:
        counter = CounterMetricFamily(name, text, labels=(*_LABELS, *labels))
        for words, value in values.items():
            counter.add_metric((*self._labels, *words), value)
        return counter


def _age(since: float | None, now: float) -> float:
    return 0.0 if since is None else max(0.0, now - since)


def _word(met: bool) -> str:
    return "true" if met else "false"


_PRIVATE = frozenset(("model",))
"""Of the summary: a path of this machine."""


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
        **{f"hopon_{name}": value for name, value in client.summary.items() if name not in _PRIVATE},
    }
    return {"".join(c if c.isalnum() else "_" for c in name): str(value) for name, value in settings.items()}


def _lengths(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to a limit."""
    return *(m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e < limit), limit
