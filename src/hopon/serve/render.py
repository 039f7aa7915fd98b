"""Turns news of outputs into the JSON of the two endpoints: whole answers and chunks of streams.

It knows the API's shapes; not where news comes from. The common chunk of a stream, text and nothing else, is a constant
envelope around one encoded string.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from hopon.core.types import FinishReason, Logprob
from hopon.serve import answers
from hopon.serve.chat import CLOSE
from hopon.serve.output import News
from hopon.serve.tokenizer import Tokenizer
from hopon.serve.tools import CallArguments, CallBegin, CallParser, Content, ToolUse

Choices = list[answers.CompletionChoice] | list[answers.ChatChoice] | list[answers.ChatDeltaChoice]

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text, and where in it each of its tokens begins."""

    text: str
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How one answer is to look.

    Args:
        id: of the answer.
        created: seconds since 1970.
        model: the name that the client used.
        prompts: token ids of every prompt.
        num_choices: outputs of each prompt; those of a prompt follow one another.
        logprobs: alternatives to show per token, or None for no log-probabilities.
        prompt_logprobs: the same for prompts, apart from the text.
        echoes: prompts that the texts begin with, if they shall.
        token_ids: show ids of prompts and outputs.
        names_ids: log-probabilities name tokens by their ids.
        tools: calls in texts are shown as such.
        usage: streams: send the usage before the end.
        usage_in_chunks: streams: and in every chunk.
    """

    id: str
    created: int
    model: str
    prompts: Sequence[tuple[int, ...]]
    num_choices: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echoes: Sequence[Echo] = ()
    token_ids: bool = False
    names_ids: bool = False
    tools: ToolUse | None = None
    usage: bool = False
    usage_in_chunks: bool = False


def encode(message: object) -> bytes:
    """JSON."""
    return _json.encode(message)


def event(message: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _json.encode(message) + b"\n\n"


class Renderer(ABC):
    """Makes the JSON of one request; news of all its outputs goes through it."""

    object_name: str
    chunk_name: str

    def __init__(self, form: Form, tokenizer: Tokenizer) -> None:
        self.form = form
        self._tokenizer = tokenizer
        self._envelopes: dict[int, tuple[bytes, bytes]] = {}  # of the outputs that have begun
        self._scores: dict[int, list[Logprob]] = {}  # of prompts; they come with the first output of each
        self._is_plain = form.logprobs is None and not (form.token_ids or form.usage_in_chunks or form.tools)

    def chunk(self, index: int, news: News, usage: Callable[[], answers.Usage]) -> bytes:
        """Events for news of one output; ``usage`` is asked only when chunks show it."""
        begun = self._envelopes.get(index)
        if begun is not None and self._is_plain and news.finish is None:
            return begun[0] + _json.encode(news.text) + begun[1]
        opening = b""
        if begun is None:
            opening = self._opening(index)
            before, _, after = event(self._chunk(index, News(text="\0"), False, None)).rpartition(b'"\\u0000"')
            self._envelopes[index] = before, after
        return opening + event(self._chunk(index, news, begun is None, usage() if self.form.usage_in_chunks else None))

    def end(self, usage: answers.Usage) -> bytes:
        """Last events of a stream that ended well."""
        return event(self._answer(self.chunk_name, [], usage)) + DONE if self.form.usage else DONE

    def whole(self, outputs: Sequence[News], usage: answers.Usage) -> bytes:
        """The body of an answer that is not streamed."""
        return _json.encode(self._whole(outputs, usage))

    def _chunk(self, index: int, news: News, first: bool, usage: answers.Usage | None) -> answers.Answer:
        return self._answer(
            self.chunk_name,
            self._news(index, news, first),
            usage if usage is not None or self.form.usage else UNSET,
        )

    def _answer(self, name: str, choices: Choices, usage: answers.Usage | UnsetType | None) -> answers.Answer:
        form = self.form
        return answers.Answer(
            id=form.id, object=name, created=form.created, model=form.model, choices=choices, usage=usage
        )

    def _ids(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self.form.token_ids else UNSET

    def _scores_of(self, index: int, news: News) -> list[Logprob]:
        """Scores of the prompt behind an output."""
        prompt = index // self.form.num_choices
        if news.prompt_logprobs:
            self._scores[prompt] = news.prompt_logprobs
        return self._scores.get(prompt, [])

    def _prompt_logprobs(self, index: int, news: News) -> answers.PromptLogprobs | UnsetType:
        """Scores of a prompt by token id, as vLLM has them."""
        wanted = self.form.prompt_logprobs
        if wanted is None:
            return UNSET
        scores: answers.PromptLogprobs = [None]
        for entry in self._scores_of(index, news):
            ranks = {token: i + 1 for i, (token, _) in enumerate(entry.top)}
            values = {entry.token: entry.logprob} | dict(entry.top[:wanted])
            scores.append(
                {
                    str(token): answers.PromptLogprob(value, ranks.get(token), self._text(token))
                    for token, value in values.items()
                }
            )
        return scores

    def _text(self, token: int) -> str:
        """What a token is called beside its log-probability."""
        return f"token_id:{token}" if self.form.names_ids else self._tokenizer.token_text(token)

    def _opening(self, index: int) -> bytes:
        """Events before the first news of an output."""
        return b""

    @abstractmethod
    def _whole(self, outputs: Sequence[News], usage: answers.Usage) -> answers.Answer: ...

    @abstractmethod
    def _news(self, index: int, news: News, first: bool) -> Choices: ...


class CompletionRenderer(Renderer):
    """/v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def _whole(self, outputs: Sequence[News], usage: answers.Usage) -> answers.Answer:
        choices = [self._choice(i, news, True) for i, news in enumerate(outputs)]
        return self._answer(self.object_name, choices, usage)

    def _news(self, index: int, news: News, first: bool) -> Choices:
        return [self._choice(index, news, first)]

    def _choice(self, index: int, news: News, first: bool) -> answers.CompletionChoice:
        prompt = index // self.form.num_choices
        echo = self.form.echoes[prompt] if first and self.form.echoes else None
        return answers.CompletionChoice(
            index=index,
            text=news.text if echo is None else echo.text + news.text,
            logprobs=None if self.form.logprobs is None else self._logprobs(index, news, echo),
            finish_reason=news.finish,
            stop_reason=news.stop_reason,
            token_ids=self._ids(news.tokens),
            prompt_token_ids=self._ids(self.form.prompts[prompt]) if first else UNSET,
            prompt_logprobs=self._prompt_logprobs(index, news) if first else UNSET,
        )

    def _logprobs(self, index: int, news: News, echo: Echo | None) -> answers.CompletionLogprobs:
        shown = answers.CompletionLogprobs([], [], [], [])
        prompt = index // self.form.num_choices
        scores: Sequence[Logprob] = ()
        if echo is not None:
            scores = self._scores_of(index, news)
            shown.tokens.append(self._name(self.form.prompts[prompt][0]))
            shown.token_logprobs.append(None)  # nothing comes before the first token
            shown.top_logprobs.append(None)
            shown.text_offset += echo.offsets
        for entry in (*scores, *news.logprobs):
            # The chosen token comes first, so that it is there even where it is not among the most likely ones.
            top = {self._name(entry.token): entry.logprob}
            for token, logprob in entry.top[: self.form.logprobs]:
                top.setdefault(self._name(token), logprob)
            shown.tokens.append(self._name(entry.token))
            shown.token_logprobs.append(entry.logprob)
            shown.top_logprobs.append(top)
        before = len(self.form.echoes[prompt].text) if self.form.echoes else 0
        shown.text_offset += [before + offset for offset in news.offsets]
        return shown

    def _name(self, token: int) -> str:
        """A token's text. One that is no UTF-8 by itself is spelled out, so that two of them keep apart."""
        if self.form.names_ids:
            return self._text(token)
        spelling = self._tokenizer.token_bytes(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class ChatRenderer(Renderer):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, form: Form, tokenizer: Tokenizer) -> None:
        super().__init__(form, tokenizer)
        self._calls: dict[int, CallParser] = {}

    @property
    def _echo(self) -> str:
        return self.form.echoes[0].text if self.form.echoes else ""

    def _whole(self, outputs: Sequence[News], usage: answers.Usage) -> answers.Answer:
        choices = []
        for i, news in enumerate(outputs):
            delta, finish, reason = self._said(i, news)
            content = self._echo + (delta.content or "")
            calls: list[answers.AnsweredCall] | UnsetType = delta.tool_calls or UNSET
            if calls:
                for call in calls:
                    call.index = UNSET
            choices.append(
                answers.ChatChoice(
                    index=i,
                    message=answers.ChatAnswer(content=None if calls and not content else content, tool_calls=calls),
                    logprobs=self._logprobs(news.logprobs),
                    finish_reason=finish,
                    stop_reason=reason,
                    token_ids=self._ids(news.tokens),
                )
            )
        answer = self._answer(self.object_name, choices, usage)
        answer.prompt_token_ids = self._ids(self.form.prompts[0])
        answer.prompt_logprobs = self._prompt_logprobs(0, outputs[0])
        return answer

    def _opening(self, index: int) -> bytes:
        choice = answers.ChatDeltaChoice(index=index, delta=answers.ChatDelta(role="assistant", content=self._echo))
        answer = self._answer(self.chunk_name, [choice], None if self.form.usage else UNSET)
        answer.prompt_token_ids = self._ids(self.form.prompts[0])
        return event(answer)

    def _news(self, index: int, news: News, first: bool) -> Choices:
        delta, finish, reason = self._said(index, news)
        return [
            answers.ChatDeltaChoice(
                index=index,
                delta=delta,
                logprobs=self._logprobs(news.logprobs),
                finish_reason=finish,
                stop_reason=reason,
                token_ids=self._ids(news.tokens),
            )
        ]

    def _said(self, index: int, news: News) -> tuple[answers.ChatDelta, str | None, int | str | None]:
        """Content and calls in an output's news, why it ended, and at which stop."""
        tools = self.form.tools
        if tools is None:
            return answers.ChatDelta(content=news.text), news.finish, news.stop_reason
        parser = self._calls.setdefault(index, CallParser(tools.names, tools.most))
        pieces = parser.push(news.text) + (parser.finish() if news.finish is not None else [])
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        calls: dict[int, answers.AnsweredCall] = {}
        for piece in pieces:
            match piece:
                case CallBegin(number, name):
                    function = answers.FunctionCall(name=name)
                    calls[number] = answers.AnsweredCall(
                        index=number, id=f"call_{secrets.token_hex(12)}", type="function", function=function
                    )
                case CallArguments(number, text):
                    calls.setdefault(number, answers.AnsweredCall(index=number)).function.arguments += text
        delta = answers.ChatDelta(content=content or UNSET, tool_calls=list(calls.values()) or UNSET)
        if parser.num_calls and news.finish is FinishReason.STOP:
            return delta, "tool_calls", None if news.stop_reason == CLOSE else news.stop_reason
        return delta, news.finish, news.stop_reason

    def _logprobs(self, entries: Sequence[Logprob]) -> answers.ChatLogprobs | None:
        if self.form.logprobs is None:
            return None
        return answers.ChatLogprobs([self._logprob(entry) for entry in entries])

    def _logprob(self, entry: Logprob) -> answers.TokenLogprob:
        spell = self._tokenizer.token_bytes
        text = self._text
        tops = [
            answers.TopLogprob(text(token), logprob, list(spell(token)))
            for token, logprob in entry.top[: self.form.logprobs]
        ]
        return answers.TokenLogprob(text(entry.token), entry.logprob, list(spell(entry.token)), tops)
