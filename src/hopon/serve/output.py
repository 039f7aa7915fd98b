"""One output in the making: deltas of token ids come in, news in text goes out, and the counts are kept.

It knows tokens, text and times; nothing of HTTP or JSON. Streams and whole answers are folds over the same news, so
they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hopon.core.types import Delta, FinishReason, Logprob, Request
from hopon.serve.metrics import Metrics
from hopon.serve.slo import Times
from hopon.serve.stream import TextStream
from hopon.serve.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class News:
    """What one or several deltas brought of one output.

    ``offsets`` are there when logprobs are. ``prompt_logprobs``, of every prompt token but the first, come with the
    first token or the end.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """What a client wants of the text.

    Args:
        stop: stop strings.
        stop_tokens: ids that the client named as stops, with the stop reason to report for each: the id itself, or a
            stop string that spells a control token.
        include_stop: keep what ended the text.
        skip_special_tokens: control tokens have no text.
        scores_only: the engine generates one token, because it must, and nobody wants it.
    """

    stop: tuple[str, ...] = ()
    stop_tokens: Mapping[int, int | str] = field(default_factory=dict)
    include_stop: bool = False
    skip_special_tokens: bool = True
    scores_only: bool = False


class Output:
    """Follows one request from its first delta to its end.

    Args:
        request: what was submitted.
        tokenizer: of the model.
        options: see there.
        metrics: told of every token and of the end.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, options: TextOptions, metrics: Metrics) -> None:
        self.request = request
        self.num_tokens = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.first_token: float | None = None
        self.admitted: float | None = None
        self._options = options
        self._metrics = metrics
        self._last_token: float | None = None
        self._prompt_logprobs: list[Logprob] = []
        self._offsets = request.params.logprobs is not None
        self._stream = TextStream(
            tokenizer,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=request.params.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            offsets=self._offsets,
        )

    def take(self, delta: Delta, now: float, news: News) -> None:
        """Add a delta to the news. After the output has ended, by a stop string too, deltas are dropped.

        Args:
            delta: the next one of the request.
            now: seconds on the monotonic clock.
            news: where to add; ``finish`` is set when the output ends here.
        """
        if self.finish is not None:
            return
        self.cached_tokens = delta.cached_tokens
        self.admitted = delta.admitted
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.tokens or delta.finish is not None:
            news.prompt_logprobs += self._prompt_logprobs
            self._prompt_logprobs = []
        if self._options.scores_only and delta.tokens:
            delta = replace(delta, tokens=(), logprobs=(), finish=FinishReason.LENGTH)
        tokens, finish = delta.tokens, delta.finish
        shown = tokens
        if finish is FinishReason.STOP and tokens and tokens[-1] in self.request.stop_token_ids:
            last = tokens[-1]  # else a guide is complete
            news.stop_reason = self._options.stop_tokens.get(last)
            if not (self._options.include_stop and last in self._options.stop_tokens):
                shown = tokens[:-1]  # what ended the text has no text
        piece = self._stream.push(shown)
        news.text += piece.text
        news.offsets += piece.offsets
        if piece.stop is not None:
            tokens = tokens[: piece.num_tokens]
            finish, news.stop_reason = FinishReason.STOP, piece.stop
        else:
            if self._offsets and len(shown) < len(tokens):
                news.offsets.append(self._stream.num_chars)
            if finish is not None:
                news.text += self._stream.finish()
        news.tokens += tokens
        news.logprobs += delta.logprobs[: len(tokens)]
        self._count(delta, len(tokens), now)
        if finish is not None:
            news.message = delta.message
            self.end(finish, now)
            news.finish = finish

    def end(self, reason: FinishReason, now: float) -> None:
        """The output ends here; nothing more of it is wanted."""
        if self.finish is None:
            self.finish = reason
            self._metrics.finished(
                reason,
                self.request.arrival,
                now,
                self.num_tokens,
                admitted=self.admitted,
                first_token=self.first_token,
                last_token=self._last_token,
            )

    @property
    def times(self) -> Times:
        """When things happened to it."""
        return Times(
            arrival=self.request.arrival,
            first=self.first_token,
            last=self._last_token,
            num_tokens=self.num_tokens,
            completed=self.finish in (FinishReason.STOP, FinishReason.LENGTH),
        )

    def _count(self, delta: Delta, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        if self._last_token is None:
            self.first_token = now
            self._metrics.first_token(
                self.request.arrival, delta.admitted, now, len(self.request.prompt), delta.cached_tokens
            )
        self._metrics.tokens(num_tokens, None if self._last_token is None else now - self._last_token)
        self._last_token = now
        self.num_tokens += num_tokens
