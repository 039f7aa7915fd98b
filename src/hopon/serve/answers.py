"""The OpenAI-compatible API as types: what answers look like. msgspec structs, which encode fast."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from hopon.serve.slo import Judgement


class Tokens(msgspec.Struct, kw_only=True):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class PromptTokensDetails(msgspec.Struct):
    """Part of the usage."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """What a request cost, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    slo: Judgement | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities as /v1/completions has them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """One token at a place of the prompt. ``rank`` counts from 1; null where the token is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token, by token id; null for the first one, which nothing comes before."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text, or news of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One alternative, as chats have it."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """One token, as chats have it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities as chats have them."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A called function, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class AnsweredCall(msgspec.Struct, kw_only=True):
    """A call that the assistant makes, or news of it. ``index`` is there in streams, the others at its beginning."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall = msgspec.field(default_factory=FunctionCall)


class ChatAnswer(msgspec.Struct, kw_only=True):
    """What the assistant says."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """News of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatDeltaChoice(msgspec.Struct, kw_only=True):
    """News of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """The whole answer of either endpoint, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatDeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
