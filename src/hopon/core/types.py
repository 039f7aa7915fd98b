"""What a request is and what a client sees of it.

Plain values only. This module knows nothing of text, models, clocks or processes: prompts and outputs are token ids,
times are seconds on whatever clock the driver uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite

from hopon.core.record import record


class FinishReason(StrEnum):
    """Why a request ended. Every request ends exactly once."""

    STOP = "stop"  # an end-of-sequence or stop token was generated (or the text layer found a stop string)
    LENGTH = "length"  # max_tokens, the model's length or the whole KV pool is used up
    ABORT = "abort"  # the client left
    REFUSED = "refused"  # it can never run here; Delta.message has the numbers
    ERROR = "error"  # the engine failed while it ran
    FATAL = "fatal"  # the engine died of it again and again: another try would end as this one did


class GuideKind(StrEnum):
    """What a guide's text is written in."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema as JSON text
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark-like, as llguidance reads it
    CHOICE = "choice"  # a JSON array of strings


@dataclass(frozen=True, slots=True)
class Guide:
    """What the output must look like: every sampled token keeps to it, and the end is allowed only where it may end."""

    kind: GuideKind
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    ``temperature=0`` is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch the respective filter off.
    ``max_tokens=None`` means "until the model's length". ``stop`` strings belong to the text layer; the core sees
    tokens only. ``logprobs=k`` returns the chosen token's log-probability and the k most likely alternatives;
    ``prompt_logprobs=k`` the same for every prompt token but the first. Log-probabilities are those of the raw model
    distribution, before temperature and filters.

    ``repetition_penalty`` looks at prompt and output, ``presence_penalty`` and ``frequency_penalty`` at the output
    only. ``logit_bias`` is added per token id; with ``allowed_token_ids`` no others are sampled; a sequence of
    ``bad_words`` is not completed while another token may be sampled; a ``guide`` is a grammar for the output.

    Raises:
        ValueError: names the field, the value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, limit: str) -> None:
            if not ok:
                value = repr(getattr(self, name))
                raise ValueError(f"{name} must be {limit}, got {value if len(value) <= 80 else value[:77] + '...'}")

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        biases = dict(self.logit_bias).items()
        object.__setattr__(self, "logit_bias", tuple((int(token), bias) for token, bias in biases))
        object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", tuple(map(tuple, self.bad_words)))
        check("temperature", isfinite(self.temperature) and self.temperature >= 0, "a finite number of at least 0")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("top_k", -1 <= self.top_k < 2**31, "in [-1, 2**31) (0 and -1 switch it off)")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1 or None")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check(
            "min_tokens",
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"at most max_tokens {self.max_tokens}",
        )
        check("stop", all(self.stop), "made of non-empty strings")
        check("seed", self.seed is None or 0 <= self.seed < 2**64, "in [0, 2**64)")
        check("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
        check(
            "prompt_logprobs",
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            f"in [0, {MAX_LOGPROBS}]",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, -2 <= getattr(self, name) <= 2, "in [-2, 2]")
        check("repetition_penalty", 0 < self.repetition_penalty < inf, "a finite number above 0")
        check("logit_bias", all(token >= 0 for token, _ in self.logit_bias), "made of token ids of at least 0")
        check("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "made of biases in [-100, 100]")
        check("allowed_token_ids", all(token >= 0 for token in self.allowed_token_ids), "made of ids of at least 0")
        check("allowed_token_ids", not (self.allowed_token_ids and self.guide), "empty beside a guide")
        for word in self.bad_words:
            valid = bool(word) and all(isinstance(token, int) and token >= 0 for token in word)
            check("bad_words", valid, "made of non-empty sequences of token ids")


MAX_LOGPROBS = 20
"""Most alternatives per position; bounds what one request can make the engine return."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked; never changes.

    Args:
        request_id: unique among the unfinished requests.
        prompt: token ids, at least one.
        params: sampling parameters; ``params.seed`` is ignored here, ``seed`` counts.
        seed: resolved 64-bit seed.
        arrival: seconds on the driver's clock.
        priority: smaller goes first.
        choice: index among several outputs of one prompt; a random stream of its own.
        stop_token_ids: every token that ends the request (end-of-sequence ids unless ignored, plus the user's).
        cache_salt: requests share cached prefixes only under the same salt.
        user: whose request it is, for fair shares; empty: everybody's.
        output: tokens already delivered by an earlier engine; generation goes on behind them.
        leader: another request with the same prompt, whose computed prompt it shares; it waits for that. Empty: none.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival: float = 0.0
    priority: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    user: str = ""
    output: tuple[int, ...] = ()
    leader: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt must have at least one token, got none")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token and of its most likely alternatives, best first, ties to the lower id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@record(kw_only=True)
class Delta:
    """News of one request. The last one has a ``finish`` reason; there is exactly one such.

    Args:
        request_id: whose news.
        time: when the step's result was committed, seconds.
        index: output index of ``tokens[0]``; lets a receiver reject repeats and gaps.
        tokens: new output tokens.
        logprobs: one per token, or empty when not asked for.
        prompt_logprobs: for prompt positions scored in this step, in order; the first prompt token has none.
        finish: why it ended, or None.
        message: for REFUSED, ERROR and FATAL, the reason with its numbers.
        cached_tokens: prompt tokens taken from the prefix cache at its first admission (set on every delta).
        admitted: when it was first given a seat, seconds; None before that.
    """

    request_id: str
    time: float
    index: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None
    message: str = ""
    cached_tokens: int = 0
    admitted: float | None = None
