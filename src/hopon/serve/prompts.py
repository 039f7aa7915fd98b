"""From what a request says to token ids: texts, conversations, truncation, lengths.

Knows the API's request bodies and the tokenizer; nothing of engines or HTTP. Long texts are tokenized in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from hopon.serve import answers, render
from hopon.serve import openai as api
from hopon.serve.stream import TextStream
from hopon.serve.structured import FieldError
from hopon.serve.tokenizer import Tokenizer
from hopon.serve.tools import ToolUse, tool_use

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters; a longer text is tokenized in a thread, so that nobody waits for it."""

TRUNCATED = 16
"""A text that shall be truncated may be so many times as long as the longest prompt; all of it is tokenized."""


class Prompts:
    """Makes prompts.

    Args:
        tokenizer: of the model.
        vocab_size: token ids are below it.
        max_model_len: longest prompt plus output.

    Methods raise ApiError, 400, for what cannot be a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    async def completions(self, body: api.CompletionRequest) -> list[tuple[int, ...]]:
        """Token ids of every prompt."""
        many = completion_texts(body)
        names = [f"prompt[{i}]" if len(many) > 1 else "prompt" for i in range(len(many))]
        num_chars = 0
        for prompt, where in zip(many, names, strict=True):
            if isinstance(prompt, str):
                self._check_text(len(prompt), where, body)
                num_chars += len(prompt)
            else:
                self._check_ids(prompt, where, body)
        begin = body.add_special_tokens is not False

        def encode() -> list[tuple[int, ...]]:
            encode = self.tokenizer.encode
            return [tuple(encode(p, add_special_tokens=begin) if isinstance(p, str) else p) for p in many]

        prompts = await self._off_loop(num_chars, encode)
        for ids, where in zip(prompts, names, strict=True):
            if not ids:
                raise api.ApiError(400, f"{where} has no tokens: there is nothing to go on from", "prompt")
        return prompts

    async def conversation(self, body: api.ChatRequest, tools: ToolUse | None) -> tuple[int, ...]:
        """Token ids of the rendered chat."""
        template = self.tokenizer.chat_template
        knows_developer = template.mentions("developer")
        if body.documents and not template.mentions("documents"):
            raise api.ApiError(400, "documents: the chat template of this model does not show any", "documents")
        messages = []
        num_chars = 0
        for i, message in enumerate(body.messages):
            role = "system" if message.role == "developer" and not knows_developer else message.role
            name = {} if message.name is None else {"name": message.name}
            messages.append({"role": role, "content": message.content, **name, **_tool_fields(message, i)})
            parts = message.content if isinstance(message.content, list) else [{"text": message.content or ""}]
            num_chars += sum(len(part["text"]) for part in parts if isinstance(part.get("text"), str))
        self._check_text(num_chars, "messages", body)
        described = [] if tools is None else tools.described()
        num_chars += sum(len(json.dumps(tool)) for tool in described)

        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                messages,
                body.opens_turn,
                described,
                kwargs=body.template_variables(),
                add_special_tokens=bool(body.add_special_tokens),
                continue_final_message=bool(body.continue_final_message),
            )

        try:
            ids = await self._off_loop(num_chars, encode)
        except ValueError as error:
            raise api.ApiError(400, str(error), "messages") from error
        if not ids:
            raise api.ApiError(400, "the conversation has no tokens: there is nothing to answer", "messages")
        return tuple(ids)

    async def echoes(self, prompts: Sequence[tuple[int, ...]]) -> list[render.Echo]:
        """Prompts as texts."""
        return await self._off_loop(sum(map(len, prompts)), lambda: [self._echo(prompt) for prompt in prompts])

    async def tokenize(self, body: api.TokenizeRequest) -> answers.Tokens:
        """POST /tokenize: ids of a text or of a rendered conversation, of any length."""
        request = body.as_request()
        request.check_supported()
        if isinstance(request, api.ChatRequest):
            with named_fields():
                tools = tool_use(request.tools, None, None)
            ids = await self.conversation(request, tools)
        else:
            [ids] = await self.completions(request) if body.prompt else [()]
        names = [self.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return answers.Tokens(count=len(ids), max_model_len=self.max_model_len, tokens=list(ids), token_strs=names)

    async def detokenize(self, body: api.DetokenizeRequest) -> str:
        """POST /detokenize: the text of token ids, control tokens spelled out."""
        for token in body.tokens:
            if not 0 <= token < self.vocab_size:
                raise api.ApiError(400, f"tokens must be in [0, {self.vocab_size}), got {token}", "tokens")
        decode = self.tokenizer.decode
        return await self._off_loop(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))

    def _echo(self, prompt: Sequence[int]) -> render.Echo:
        """A prompt as text. Control tokens are spelled out, but for a BOS in front, which nobody wrote."""
        stream = TextStream(self.tokenizer, skip_special_tokens=False, offsets=True, continuation=False)
        begin = self.tokenizer.vocabulary.bos_id
        hidden = 1 if prompt[0] == begin and self.tokenizer.encode("") == [begin] else 0
        piece = stream.push(prompt[hidden:])
        return render.Echo(piece.text + stream.finish(), (0,) * hidden + piece.offsets)

    def check_length(self, prompt: int, max_tokens: int, field_name: str) -> None:
        """Refuse a prompt of so many tokens with so many to generate that the model is not long enough for."""
        limit = self.max_model_len
        if max_tokens < 1:
            raise api.ApiError(400, f"{field_name} must be at least 1, got {max_tokens}", field_name)
        if prompt + max_tokens > limit:
            raise api.ApiError(
                400,
                f"the prompt has {prompt} tokens and {field_name} is {max_tokens}: together {prompt + max_tokens}, but "
                f"the maximum length of this model is {limit} tokens",
                field_name if prompt < limit else "prompt",
            )

    def cut(self, prompt: tuple[int, ...], body: api.CommonRequest, max_tokens: int | None) -> tuple[int, ...]:
        """A prompt as ``truncate_prompt_tokens`` wants it."""
        wanted, limit = body.truncate_prompt_tokens, self.max_model_len
        if wanted is None:
            return prompt
        if wanted == 0 or wanted >= limit:
            raise api.ApiError(
                400, f"truncate_prompt_tokens must be -1 or in [1, {limit}), got {wanted}", "truncate_prompt_tokens"
            )
        room = max(1, limit - max(1, max_tokens or 1)) if wanted == -1 else wanted
        return prompt[:room] if body.truncation_side == "right" else prompt[-room:]

    def bad_words(self, body: api.CommonRequest) -> list[tuple[int, ...]]:
        """Token sequences that may not be completed."""
        sequences = []
        for word in body.bad_words or ():
            if not word.strip() or len(word) > api.MAX_STOP_CHARS:
                limit = f"1 to {api.MAX_STOP_CHARS} characters that are not all blank"
                raise api.ApiError(400, f"bad_words must have {limit}, got {word[:40]!r}", "bad_words")
            sequences += self.tokenizer.bad_word(word)
        return sequences

    def _check_ids(self, ids: Sequence[int], where: str, body: api.CommonRequest) -> None:
        longest = self.max_model_len
        if len(ids) >= longest and body.truncate_prompt_tokens is None:
            raise api.ApiError(
                400,
                f"{where} has {len(ids)} tokens, but the maximum length of this model is {longest} tokens",
                "prompt",
            )
        limit = self.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < limit:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise api.ApiError(400, f"{where}: token ids must be in [0, {limit}), got {wrong}", "prompt")

    def _check_text(self, num_chars: int, where: str, body: api.CommonRequest) -> None:
        """Refuse a text that is too long however it is cut into tokens, before cutting it."""
        least = self.tokenizer.fewest_tokens(num_chars)
        limit = self.max_model_len
        if body.truncate_prompt_tokens is not None and least < TRUNCATED * limit:
            return
        if least >= limit:
            raise api.ApiError(
                400,
                f"{where} has {num_chars} characters, at least {least} tokens, but the maximum length of this model is "
                f"{limit} tokens",
                where.partition("[")[0],
            )

    async def _off_loop(self, num_chars: int, function: Callable[[], T]) -> T:
        if num_chars <= LONG_TEXT:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def completion_texts(body: api.CompletionRequest) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    given = body.prompt
    alone = not isinstance(given, list) or not given or type(given[0]) is int
    return cast(list[str | list[int]], [given] if alone else given)


def chat_texts(body: api.ChatRequest) -> Iterator[str]:
    """What is said; the template adds a little more."""
    for message in body.messages:
        parts = message.content if isinstance(message.content, list) else [{"text": message.content or ""}]
        yield from (part["text"] for part in parts if isinstance(part.get("text"), str))


def _tool_fields(message: api.ChatMessage, index: int) -> dict[str, Any]:
    """What a message says of calls, as templates want it."""
    where = f"messages[{index}].tool_calls"
    with named_fields():
        calls = [call.described(f"{where}[{i}]") for i, call in enumerate(message.tool_calls or ())]
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    return fields if message.tool_call_id is None else fields | {"tool_call_id": message.tool_call_id}


@contextlib.contextmanager
def named_fields() -> Iterator[None]:
    """Errors of fields become answers."""
    try:
        yield
    except FieldError as error:
        raise api.ApiError(400, str(error), error.param) from error
