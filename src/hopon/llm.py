"""The offline API: a model in this process, prompts in, answers out.

``LLM`` runs the same engine loop as the server, in the calling thread. Signatures and result fields are those that
users of vLLM's ``LLM`` class know. This module wires the text layer, the engine and the executor together; it knows
nothing of HTTP.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hopon.catalogue import DEFAULT_CACHE, resolve
from hopon.core.engine import Abort, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import ExecutorFactory
from hopon.core.policy.presets import engine_options, policy_of
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Request, SamplingParams
from hopon.core.types import Logprob as CoreLogprob
from hopon.hub import Progress
from hopon.serve.stream import TextStream
from hopon.serve.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages: ``{"role": ..., "content": ...}`` each."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at one position. ``rank`` counts from 1; None when it is not among those reported."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer.

    Args:
        index: 0.
        text: the answer, without the stop string or stop token that ended it.
        token_ids: every generated token, the one that ended it included.
        cumulative_logprob: sum over the tokens, where log-probabilities were asked for.
        logprobs: per token, by token id: the chosen one and the most likely ones, where asked for.
        finish_reason: "stop", "length", or "refused" (see ``RequestOutput.error``).
        stop_reason: the stop string or user-given stop token that ended it; None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What became of one prompt.

    Args:
        request_id: unique within the LLM.
        prompt: the text, where the prompt was text.
        prompt_token_ids: what the model saw.
        prompt_logprobs: per prompt token, by token id; None for the first token. Only where asked for.
        outputs: the answers.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: why it could not run; empty otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    error: str = ""


class LLM:
    """A model, ready to answer.

    Args:
        model: a catalogue name, a ``.gguf`` file, a model's folder, or a hub id; see :func:`hopon.catalogue.resolve`.
        dtype: "auto", "f32", "bf16", "q8" or "q4".
        cache_dir: root of hopon's cache.
        progress: told about downloads.
        factory: makes the executor; the CPU's by default.
        options: further fields of :class:`hopon.core.config.EngineOptions`, such as ``max_model_len`` or ``policy``; a
            policy's own settings fill in what is not given.

    Raises:
        ModelNotFoundError: see :func:`hopon.catalogue.resolve`.
        ValueError, OSError: an option or a file is not what it should be.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        cache_dir: str | Path = DEFAULT_CACHE,
        progress: Progress = lambda what, done, total: None,
        factory: ExecutorFactory | None = None,
        **options: Any,
    ) -> None:
        cache = Path(cache_dir).expanduser()
        path = resolve(str(model), cache, progress)
        self.tokenizer = Tokenizer.load(path)
        if factory is None:
            from hopon.model import cpu

            factory = cpu.load
        given = {"model": str(path), "dtype": dtype, "cache_dir": str(cache)} | options
        asked = engine_options(given, lambda: _context_length(path))
        self._deployment = factory(asked, lambda what, share: None)
        scheduler = Scheduler(self._deployment.config, policy_of(asked, self._deployment.config))
        scheduler.close_input()  # all requests of a call are there from its beginning
        self._engine = Engine(scheduler, self._deployment.executor)
        self._num_requests = 0
        self._is_open = True

    @property
    def summary(self) -> dict[str, str | int | float]:
        """What runs: dtype, level, threads, bytes, tokens."""
        return self._deployment.summary

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts; the i-th output belongs to the i-th prompt.

        Args:
            prompts: one prompt or a list: text or token ids.
            sampling_params: one for all or one each; by default 16 tokens at temperature 1.
            use_tqdm: show progress on stderr where that is a terminal.

        Raises:
            ValueError: a prompt can never be answered; names it by its index, and drops the others.
        """
        return self._answer(as_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, as the model's chat template puts them.

        Raises:
            ValueError: a conversation is not usable or can never be answered.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        prompts = [
            {
                "prompt_token_ids": self.tokenizer.encode_chat(
                    conversation, add_generation_prompt, tools, chat_template_kwargs
                ),
                "prompt": self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt, tools, chat_template_kwargs
                ),
            }
            for conversation in conversations
        ]
        return self._answer(prompts, sampling_params, use_tqdm)

    def answer_each(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        on_output: Callable[[int, RequestOutput], None],
        *,
        stop_at_error: bool = False,
    ) -> None:
        """Answer prompts and tell of each answer as soon as it is there; the index is that of the prompt.

        A prompt that can never be answered is told with an ``error``; the others go on unless ``stop_at_error``. After
        Ctrl-C the unfinished ones are dropped and KeyboardInterrupt is raised; the LLM can be used again.

        Raises:
            ValueError: a prompt is empty or not a prompt; names its index.
        """
        assert self._is_open, "this LLM is closed"
        assert len(prompts) == len(params), "one set of sampling parameters for every prompt"
        answers = {}
        for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            answer = self._request(index, prompt, chosen)
            answers[answer.request.request_id] = answer
        inbox = _Batch([answer.request for answer in answers.values()])

        def emit(deltas: Sequence[Delta], stats: EngineStats) -> None:
            for delta in deltas:
                answer = answers.get(delta.request_id)
                if answer is None or delta.finish is FinishReason.ABORT:  # ended by a stop string, or by Ctrl-C
                    continue
                if answer.take(delta):
                    del answers[delta.request_id]
                    if delta.finish is None:
                        inbox.commands.append(Abort(delta.request_id))
                    inbox.is_stopping |= stop_at_error and answer.error != ""
                    on_output(answer.index, answer.output(self.tokenizer))
            inbox.unfinished = tuple(answers)

        try:
            with _interrupts_into(inbox):
                self._engine.run(inbox, emit)
        except BaseException:
            self.close()  # a step broke off, so scheduler and executor no longer agree
            raise
        if inbox.is_interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Give back threads and memory; the LLM cannot be used afterwards."""
        if self._is_open:
            self._is_open = False
            self._deployment.executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: Sequence[SamplingParams] = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = sampling_params
        if len(params) != len(prompts):
            raise ValueError(f"sampling_params must be one or as many as prompts ({len(prompts)}), got {len(params)}")
        outputs: dict[int, RequestOutput] = {}
        with _progress_bar(len(prompts) if use_tqdm else 0) as advance:

            def keep(index: int, output: RequestOutput) -> None:
                outputs[index] = output
                advance()

            self.answer_each(prompts, params, keep, stop_at_error=True)
        for index, output in sorted(outputs.items()):
            if output.error:
                raise ValueError(f"prompt {index}: {output.error}")
        return [outputs[index] for index in range(len(prompts))]

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> _Answer:
        """A prompt as the engine takes it."""
        text, ids = self._encode(index, prompt)
        eos = () if params.ignore_eos else tuple(sorted(self.tokenizer.eos_ids))
        try:
            request = Request(
                request_id=str(self._num_requests),
                prompt=tuple(ids),
                params=params,
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                arrival=self._engine.clock.now(),
                stop_token_ids=(*eos, *(token for token in params.stop_token_ids if token not in eos)),
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
        self._num_requests += 1
        stream = TextStream(self.tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        return _Answer(index=index, prompt=text, request=request, stream=stream)

    def _encode(self, index: int, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        ids: Any = prompt
        text = None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None and isinstance(text, str):
                return text, self.tokenizer.encode(text)
        if not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
            raise ValueError(f"prompt {index} must be text or a list of token ids, got {_short(prompt)}")
        for token in ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise ValueError(f"prompt {index}: token id must be in [0, {self.tokenizer.vocab_size}), got {token}")
        return text, ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several: always several. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]  # type: ignore[list-item]  # a sequence of integers, as the line above found
    return prompts  # type: ignore[return-value]  # not a single prompt, so a sequence of them


@dataclass(kw_only=True, slots=True)
class _Answer:
    """A request and what has come of it."""

    index: int
    prompt: str | None
    request: Request
    stream: TextStream
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[CoreLogprob] = field(default_factory=list)
    prompt_logprobs: list[CoreLogprob] = field(default_factory=list)
    cached: int = 0
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: str = ""

    def take(self, delta: Delta) -> bool:
        """Take news in; True when it was the last that counts."""
        self.cached = delta.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs
        num_kept, num_shown = len(delta.tokens), len(delta.tokens)
        ended_by = None  # a guide may be complete without a stop token
        if delta.finish is FinishReason.STOP and delta.tokens and delta.tokens[-1] in self.request.stop_token_ids:
            ended_by = delta.tokens[-1]
        if ended_by is not None:
            num_shown -= 1
        piece = self.stream.push(delta.tokens[:num_shown])
        self.text.append(piece.text)
        if piece.stop is not None:
            num_kept, self.finish, self.stop = piece.num_tokens, FinishReason.STOP, piece.stop
        elif delta.finish is not None:
            self.text.append(self.stream.finish())
            self.finish = delta.finish
            self.stop = ended_by if ended_by in self.request.params.stop_token_ids else None
            self.error = delta.message
        self.tokens += delta.tokens[:num_kept]
        self.logprobs += delta.logprobs[:num_kept]
        return self.finish is not None

    def output(self, tokenizer: Tokenizer) -> RequestOutput:
        """The result as users see it."""
        assert self.finish is not None, "only a finished request has an output"
        params = self.request.params
        logprobs = None if params.logprobs is None else [_by_token(entry, tokenizer) for entry in self.logprobs]
        completion = CompletionOutput(
            index=0,
            text="".join(self.text),
            token_ids=self.tokens,
            cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in self.logprobs),
            logprobs=logprobs,
            finish_reason=self.finish.value,
            stop_reason=self.stop,
        )
        scores: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scores = [None, *(_by_token(entry, tokenizer) for entry in self.prompt_logprobs)]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt),
            prompt_logprobs=scores,
            outputs=[completion],
            num_cached_tokens=self.cached,
            error=self.error,
        )


def _by_token(entry: CoreLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The chosen token first, then the most likely ones."""
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    values = {entry.token: entry.logprob, **dict(entry.top)}
    return {token: Logprob(value, ranks.get(token), tokenizer.token_text(token)) for token, value in values.items()}


class _Batch:
    """An inbox that hands out a list of requests and shuts down when all are finished."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.commands: list[Command] = list(requests)
        self.unfinished: tuple[str, ...] = tuple(request.request_id for request in requests)
        self.is_stopping = False
        self.is_interrupted = False

    def drain(self, timeout: float | None) -> Sequence[Command]:
        """See :class:`hopon.core.engine.Inbox`."""
        if self.is_stopping or not self.unfinished:
            return [*self.commands, Shutdown()]
        commands, self.commands = self.commands, []
        if not commands and timeout:
            time.sleep(timeout)
        return commands


@contextmanager
def _interrupts_into(inbox: _Batch) -> Iterator[None]:
    """Ctrl-C ends the batch between two steps, so that the engine stays whole; a second one does not wait."""
    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        if inbox.is_interrupted:
            raise KeyboardInterrupt
        inbox.is_interrupted = inbox.is_stopping = True

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Counts answers on stderr; 0 shows nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (total and console.is_terminal)) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda: bar.advance(task)


def _context_length(path: Path) -> int:
    from hopon.model.source import open_source

    return open_source(path).config.context_length


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
