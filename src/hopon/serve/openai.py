"""The OpenAI-compatible API as types: what requests may say. Answers are in :mod:`hopon.serve.answers`.

Requests are pydantic models, so that the OpenAPI document describes them. A field that hopon does not support yet is
declared with its neutral values: null or neutral is accepted, anything else is refused with an error that names the
field. Unknown fields are refused too. Nothing is ignored silently; fields that only identify the caller or hint at
something that happens anyway have no effect, and say so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from hopon.core.types import MAX_LOGPROBS, Guide, SamplingParams
from hopon.serve.chat import flatten
from hopon.serve.slo import Slo
from hopon.serve.structured import StructuredRequest
from hopon.serve.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice

MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_PARTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKENS = 128
MAX_ID_CHARS = 128
MAX_CALLS = 128
MAX_CHOICES = 128
MAX_OUTPUTS = 256
MAX_BAD_WORDS = 256

_PENALTIES = ("repetition", "presence", "frequency")
_ID = re.compile(r"[A-Za-z0-9._:@/+=-]+")


class ApiError(Exception):
    """An error with its HTTP status, in OpenAI's terms."""

    _TYPES = {  # noqa: RUF012 - never written
        400: "BadRequestError",
        401: "AuthenticationError",
        404: "NotFoundError",
        408: "RequestTimeoutError",
        413: "RequestEntityTooLargeError",
        429: "RateLimitError",
        500: "InternalServerError",
        503: "ServiceUnavailableError",
        504: "TimeoutError",
    }

    def __init__(self, status: int, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        kind = self._TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class Neutral:
    """Marks a field that is not supported yet, with the values that change nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)


class StreamOptions(BaseModel):
    """Extras of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = Field(None, description="One more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(None, description="Usage in every chunk.")
    include_obfuscation: Annotated[bool | None, Neutral(False)] = None


Number = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(allow_inf_nan=False, gt=0)]


class SloLimits(BaseModel):
    """Limits for the times of this request; whether they were met is told in ``usage.slo`` and in the metrics."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ttft_ms: Milliseconds | None = Field(None, description="From arrival to the first token.")
    tpot_ms: Milliseconds | None = Field(None, description="Mean time between tokens behind the first.")
    e2e_ms: Milliseconds | None = Field(None, description="From arrival to the last token.")

    def limits(self) -> Slo:
        """In seconds."""
        seconds = [None if ms is None else ms / 1e3 for ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)]
        return Slo(ttft=seconds[0], tpot=seconds[1], e2e=seconds[2])


class ModelRequest(BaseModel):
    """What concerns one of the served models."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="A served name; may be left out.")


class CommonRequest(StructuredRequest, ModelRequest):
    """Fields that both endpoints share."""

    max_tokens: int | None = Field(None, description="Most tokens to generate.")
    temperature: Number | None = Field(None, description="0 is greedy. Default: the model's, else 1.")
    top_p: Number | None = Field(None, description="In (0, 1]. Default: the model's, else 1.")
    top_k: int | None = Field(None, description="0 and -1 switch it off. Default: the model's, else off.")
    min_p: Number | None = Field(None, description="In [0, 1]. Default: the model's, else 0.")
    seed: int | None = Field(None, description="64 bits. Without one the server draws it; see header x-hopon-seed.")
    stop: str | list[str] | None = Field(None, description=f"Up to {MAX_STOPS} strings that end the text.")
    stop_token_ids: list[int] | None = Field(
        None, max_length=MAX_STOP_TOKENS, description=f"Up to {MAX_STOP_TOKENS} tokens that end the text."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended the text.")
    ignore_eos: bool | None = Field(None, description="The model's end tokens end nothing.")
    min_tokens: int | None = Field(None, description="Nothing ends the text before so many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Control tokens have no text. Default true.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers to every prompt. Default 1.")
    best_of: int | None = Field(None, description="Must be n: all answers are returned.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(
        None, description=f"Log-probabilities of the prompt, with 0 to {MAX_LOGPROBS} alternatives; not in streams."
    )
    return_token_ids: bool | None = Field(None, description="Token ids of prompt and output in the answer.")
    request_id: str | None = Field(None, description="Becomes part of the answer's id.")
    slo: SloLimits | None = Field(None, description="Limits for its times; streams then end with the usage.")
    cache_salt: str | None = Field(None, description="Cached prefixes are shared under the same salt only.")
    user: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")

    frequency_penalty: Number | None = Field(
        None, description="In [-2, 2]; taken off a token's logit for each time that the output has it."
    )
    presence_penalty: Number | None = Field(
        None, description="In [-2, 2]; taken off the logit of every token that the output has."
    )
    repetition_penalty: Number | None = Field(
        None,
        description="Above 0; positive logits of tokens of prompt and output are divided by it, others multiplied. "
        "Default: the model's, else 1.",
    )
    logit_bias: dict[str, Number] | None = Field(None, description="Token id to what is added to its logit.")
    allowed_token_ids: list[int] | None = Field(None, description="Only these tokens are generated.")
    bad_words: list[str] | None = Field(
        None, max_length=MAX_BAD_WORDS, description=f"Up to {MAX_BAD_WORDS} texts whose tokens are never completed."
    )
    spaces_between_special_tokens: bool | None = Field(None, description="No spaces are ever put in. Has no effect.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only so many tokens of a prompt; -1: what fits beside max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts. Default left: the end of the prompt stays."
    )
    return_tokens_as_token_ids: bool | None = Field(None, description="Log-probabilities name tokens token_id:ID.")

    length_penalty: Annotated[Number | None, Neutral(1)] = None
    use_beam_search: Annotated[bool | None, Neutral(False)] = None
    logprob_token_ids: Annotated[list[int] | None, Neutral([])] = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Smaller goes first. Waiting a while is worth a step. Default 0."
    )
    return_token_offsets: Annotated[bool | None, Neutral(False)] = None
    kv_transfer_params: Annotated[dict[str, Any] | None, Neutral({})] = None
    ec_transfer_params: Annotated[dict[str, Any] | None, Neutral({})] = None
    vllm_xargs: Annotated[dict[str, Any] | None, Neutral({})] = None
    repetition_detection: Annotated[dict[str, Any] | None, Neutral({})] = None
    thinking_token_budget: Annotated[int | None, Neutral()] = None

    def check_supported(self) -> None:
        """Raise ApiError for the first field that asks for something hopon cannot do yet."""
        _check_neutral(self)
        if self.stream_options is not None:
            if not self.stream:
                raise ApiError(400, "stream_options needs stream to be true", "stream_options")
            _check_neutral(self.stream_options, "stream_options.")
        if self.prompt_logprobs is not None:
            check_logprobs("prompt_logprobs", self.prompt_logprobs)
            if self.stream:
                raise ApiError(400, "prompt_logprobs is not available with stream", "prompt_logprobs")
        for name in ("request_id", "cache_salt"):
            check_id(name, getattr(self, name))
        if self.best_of is not None and self.best_of != self.num_choices:
            raise ApiError(400, f"best_of must be n, which is {self.num_choices}, got {self.best_of}", "best_of")
        if self.allowed_token_ids == []:
            raise ApiError(400, "allowed_token_ids must not be empty", "allowed_token_ids")

    @property
    def num_choices(self) -> int:
        """Answers to every prompt."""
        return 1 if self.n is None else self.n

    def stops(self) -> tuple[str, ...]:
        """Stop strings; null and [] are none."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise ApiError(400, f"stop must have at most {MAX_STOPS} strings, got {len(stops)}", "stop")
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise ApiError(400, f"stop strings must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", "stop")
        return stops

    def num_logprobs(self) -> int | None:
        """Alternatives per token, or None for no log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token, or None for no log-probabilities of the prompt."""
        return self.prompt_logprobs

    def biases(self) -> dict[int, float]:
        """Token id to logit bias. Raises ApiError for what is no id."""
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ApiError(400, f"logit_bias must be made of token ids, got {key[:40]!r}", "logit_bias")
        return {int(key): bias for key, bias in (self.logit_bias or {}).items()}

    def token_ids(self) -> dict[str, Collection[int]]:
        """Ids that must be in the vocabulary, by the field's name."""
        return {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.biases(),
            "allowed_token_ids": self.allowed_token_ids or (),
        }

    def sampling(
        self,
        defaults: Mapping[str, float],
        max_tokens: int,
        seed: int,
        bad_words: Sequence[Sequence[int]] = (),
        guide: Guide | None = None,
    ) -> SamplingParams:
        """How to sample; ``defaults`` are the model's own, ``bad_words`` token ids of the field.

        Raises:
            ApiError: 400, names the field.
        """
        names = ("temperature", "top_p", "top_k", "min_p", *(f"{kind}_penalty" for kind in _PENALTIES))
        chosen = {name: getattr(self, name) for name in names}
        try:
            return SamplingParams(
                **dict(defaults) | {name: value for name, value in chosen.items() if value is not None},
                max_tokens=max_tokens,
                min_tokens=self.min_tokens or 0,
                ignore_eos=bool(self.ignore_eos),
                stop=self.stops(),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                seed=seed,
                logprobs=self.num_logprobs(),
                prompt_logprobs=self.num_prompt_logprobs(),
                logit_bias=tuple(self.biases().items()),
                allowed_token_ids=tuple(self.allowed_token_ids or ()),
                bad_words=tuple(map(tuple, bad_words)),
                guide=guide,
            )
        except ValueError as error:
            param = str(error).partition(" ")[0]
            raise ApiError(400, str(error), param if param in type(self).model_fields else None) from error


Prompt = str | list[str] | list[int] | list[list[int]]


def _check_prompt(value: Any) -> Any:
    """Types of a prompt. pydantic would try each member of the union on millions of ids; this is a pass in C."""
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if isinstance(value, str) or kinds == {int}:
        return value
    if isinstance(value, list) and kinds <= {str, list} and len(kinds) <= 1:
        if not 1 <= len(value) <= MAX_PROMPTS:
            raise ValueError(f"prompt must be 1 to {MAX_PROMPTS} prompts, got {len(value)}")
        if kinds == {str} or all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise ValueError("prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)] = Field(
        description="Text (control tokens in it are parsed) or token ids (taken as they are), or a list of either; "
        f"up to {MAX_PROMPTS} prompts."
    )
    logprobs: int | None = Field(None, description=f"Alternatives per token, 0 to {MAX_LOGPROBS}.")
    add_special_tokens: bool | None = Field(None, description="Begin text prompts with the model's BOS. Default true.")
    echo: bool | None = Field(
        None,
        description="The text begins with the prompt; with logprobs, also its log-probabilities. Allows max_tokens 0.",
    )
    suffix: Annotated[str | None, Neutral("")] = None
    prompt_embeds: Annotated[str | None, Neutral()] = None

    def num_logprobs(self) -> int | None:
        """See base."""
        if self.logprobs is not None:
            check_logprobs("logprobs", self.logprobs)
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """See base. Echoed prompts show as many alternatives as the output."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def scores_only(self) -> bool:
        """Whether nothing shall be generated, only the prompt be scored or echoed."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)


class ChatMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = Field(
        None, description='A text, or parts {"type": "text", "text": ...}, joined with line feeds.'
    )
    name: str | None = Field(None, description="For chat templates that show it.")
    refusal: Annotated[str | None, Neutral("")] = None
    audio: Annotated[dict[str, Any] | None, Neutral({})] = None
    annotations: Annotated[list[Any] | None, Neutral([])] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = Field(
        None, description="For role assistant: the calls that it made."
    )
    tool_call_id: str | None = Field(None, description="For role tool: the call that this is the result of.")
    function_call: Annotated[dict[str, Any] | None, Neutral({})] = None
    reasoning: Annotated[str | None, Neutral("")] = None
    reasoning_content: Annotated[str | None, Neutral("")] = None
    parsed: Any = Field(None, description="The openai package's reading of the content. Has no effect.")

    @property
    def text(self) -> str:
        """All of the content, once it has been found to be text."""
        return str(flatten({"content": self.content}, 0)["content"])


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(
        None, description="Most tokens to generate; goes before max_tokens. Default: what the context has left."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description=f"Alternatives per token, 0 to {MAX_LOGPROBS}; needs logprobs.")
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the answer. Default true.")
    add_special_tokens: bool | None = Field(None, description="Apply the model's BOS rule to the rendered text too.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of opening a new turn."
    )
    echo: bool | None = Field(None, description="The answer begins with the last message where it goes on with it.")
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that show documents.")
    reasoning_effort: str | None = Field(None, max_length=MAX_ID_CHARS, description="A chat template variable.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")
    include_reasoning: bool | None = Field(None, description="Answers are never split. Has no effect.")
    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Prefixes are found by themselves. Has no effect.")

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f"Up to {MAX_TOOLS} functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, or the function that must be called. Default: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most. Default: any number.")
    functions: Annotated[list[Any] | None, Neutral([])] = None
    function_call: Annotated[str | dict[str, Any] | None, Neutral("none", "auto")] = None
    chat_template: Annotated[str | None, Neutral()] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Neutral({})] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Neutral({})] = None
    modalities: Annotated[list[str] | None, Neutral(["text"])] = None
    audio: Annotated[dict[str, Any] | None, Neutral()] = None
    prediction: Annotated[dict[str, Any] | None, Neutral()] = None
    store: Annotated[bool | None, Neutral(False)] = None
    service_tier: Annotated[str | None, Neutral("auto", "default")] = None
    verbosity: Annotated[str | None, Neutral("medium")] = None
    web_search_options: Annotated[dict[str, Any] | None, Neutral()] = None
    moderation: Annotated[dict[str, Any] | None, Neutral()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Neutral({})] = None
    prompt_cache_retention: Annotated[str | None, Neutral("in_memory", "in-memory")] = None

    def num_logprobs(self) -> int | None:
        """See base."""
        top = self.top_logprobs
        if top is not None:
            check_logprobs("top_logprobs", top)
        if top and not self.logprobs:
            raise ApiError(400, f"top_logprobs {top} needs logprobs to be true", "top_logprobs")
        return (top or 0) if self.logprobs else None

    @property
    def opens_turn(self) -> bool:
        """Whether the prompt ends with the opening of the assistant's turn."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        fields = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in fields.items() if value} | (self.chat_template_kwargs or {})

    def check_supported(self) -> None:
        """See base."""
        for name in ("functions", "function_call"):
            if getattr(self, name) not in (None, [], "none", "auto"):
                raise ApiError(400, f"{name} is not supported: use tools and tool_choice", name)
        super().check_supported()
        if self.add_generation_prompt and self.continue_final_message:
            raise ApiError(400, "continue_final_message excludes add_generation_prompt", "continue_final_message")
        for i, message in enumerate(self.messages):
            if message.role == "function":
                raise ApiError(400, f"messages[{i}].role 'function' is not supported: use role 'tool'", "messages")
            _check_neutral(message, f"messages[{i}].")
            for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
                if getattr(message, name) and message.role != role:
                    raise ApiError(400, f"messages[{i}].{name} is for role {role!r} only", "messages")
            if message.content is None and message.role != "assistant":
                raise ApiError(400, f"messages[{i}].content must not be null for role {message.role!r}", "messages")


class TokenizeRequest(ModelRequest):
    """POST /tokenize: a text, or a conversation."""

    prompt: str | None = Field(None, description="A text; control tokens in it are parsed.")
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(None, description="Default: true for a text, false for a conversation.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str | None, Neutral()] = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    return_token_strs: bool | None = Field(None, description="The text of every token, too.")

    def as_request(self) -> CompletionRequest | ChatRequest:
        """The request whose prompt it asks for; truncation is asked for so that no length is too much, and never done.

        Raises:
            ApiError: 400, it has both a text and a conversation, or neither, or a field of the other kind.
        """
        _check_neutral(self)
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        alien = {"model", "prompt", "messages", "return_token_strs"}
        given = self.model_dump(exclude=alien) | {"truncate_prompt_tokens": -1}
        if self.messages is not None:
            return ChatRequest.model_validate(given | {"messages": self.messages})
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if given.get(name):
                raise ApiError(400, f"{name} needs messages", name)
        names = ("truncate_prompt_tokens", "add_special_tokens")
        return CompletionRequest.model_validate({name: given.get(name) for name in names} | {"prompt": self.prompt})


class DetokenizeRequest(ModelRequest):
    """POST /detokenize."""

    tokens: list[int]


def check_logprobs(name: str, count: int) -> None:
    """Raise ApiError unless so many alternatives per token may be asked for."""
    if not 0 <= count <= MAX_LOGPROBS:
        raise ApiError(400, f"{name} must be in [0, {MAX_LOGPROBS}], got {count}", name)


def check_id(name: str, value: str | None) -> None:
    """Raise ApiError unless an id is short and printable, so that it can be repeated in answers and logs."""
    if value is None:
        return
    if len(value) > MAX_ID_CHARS:
        raise ApiError(400, f"{name} must have at most {MAX_ID_CHARS} characters, got {len(value)}", name)
    if not _ID.fullmatch(value):
        raise ApiError(400, f"{name} must be made of letters, digits and ._:@/+=-", name)


@cache
def _neutral_fields(model: type[BaseModel]) -> dict[str, list[Any]]:
    fields = {}
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Neutral):
                fields[name] = mark.values
    return fields


def _check_neutral(model: BaseModel, where: str = "") -> None:
    for name, neutral in _neutral_fields(type(model)).items():
        value = getattr(model, name)
        if value is not None and value not in neutral:
            accepted = " or ".join(["null", *map(repr, neutral)])
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
            param = f"{where}{name}"
            raise ApiError(400, f"{param} is not supported yet: it must be {accepted}, got {shown}", param)
