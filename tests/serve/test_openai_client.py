"""The official ``openai`` package, unchanged, makes every kind of call that it has for what hopon serves."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import Server, eventually, running, script, write_model

HI: Any = [{"role": "user", "content": "Hi there"}]
ASK: Any = [{"role": "user", "content": "Describe a red toy car as JSON."}]
LONG: dict[str, Any] = {"model": "fake", "prompt": [99], "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def connect(server: Server, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[openai.OpenAI]:
    """A client of a real model, which guides can lead."""
    engine = {"dtype": "q4", "max_model_len": 768, "max_num_seqs": 4, "num_kv_blocks": 256}
    with running(smollm2, factory="hopon.model.cpu:load", engine=engine) as server, connect(server) as client:
        yield client


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat, one place in the queue, 20 ms a step, and a key."""
    folder = write_model(tmp_path_factory.mktemp("models") / "strict", fake={"step_time": 0.02})
    with running(folder, engine={"max_num_seqs": 1}, max_queued_requests=1, api_keys=["sk-right"]) as server:
        server.http.headers["authorization"] = "Bearer sk-right"
        yield server


# ---- completions ----


def test_completions(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Every form of a prompt, several prompts with several choices, scores, echo, stops, and a stream of them."""
    ids = tokenizer.encode("Hello world")
    forms: list[Any] = ["Hello world", ids, ["Hello world"], [ids]]
    texts = {client.completions.create(model="fake", prompt=form, temperature=0).choices[0].text for form in forms}
    assert len(texts) == 1
    many = client.completions.create(model="fake", prompt=["one", "two"], n=2, seed=1, max_tokens=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    scored = client.completions.create(model="fake", prompt="Hello world", echo=True, max_tokens=0, logprobs=1)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == scored.choices[0].text == "Hello world"
    said = script(*tokenizer.encode("one two three", add_special_tokens=False))
    stopped = client.completions.create(model="fake", prompt=said, stop=" three", max_tokens=20)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two", "stop")
    assert stopped.usage is not None
    stream = client.completions.create(
        model="fake", prompt=said, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "one two three"
    assert chunks[-1].usage is not None


def test_fields_that_only_servers_like_this_one_know(client: openai.OpenAI) -> None:
    """``extra_body`` carries them there, model_extra and the headers carry answers back."""
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="x", max_tokens=4, extra_body={"top_k": 3, "ignore_eos": True, "return_token_ids": True}
    )
    completion = raw.parse()
    assert completion.choices[0].model_extra is not None
    assert len(completion.choices[0].model_extra["token_ids"]) == 4
    again = client.completions.create(
        model="fake",
        prompt="x",
        max_tokens=4,
        seed=int(raw.headers["x-hopon-seed"]),
        extra_body={"top_k": 3, "ignore_eos": True},
    )
    assert again.choices[0].text == completion.choices[0].text
    with client.completions.with_streaming_response.create(model="fake", prompt="x", max_tokens=4) as response:
        assert json.loads(response.read())["object"] == "text_completion"


# ---- chats ----


def test_chats(client: openai.OpenAI) -> None:
    """Roles, parts, choices, scores, sampling fields and neutral values of what is not supported."""
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "Go on.", "name": "somebody"},
        ],
        n=2,
        seed=3,
        max_completion_tokens=4,
        temperature=0.9,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"100": -100},
        logprobs=True,
        top_logprobs=2,
        stop=["#"],
        user="somebody",
        store=False,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_streamed_chats(client: openai.OpenAI) -> None:
    """Chunks, the helper that gathers them, and a stream that is closed early: the same text as a whole answer."""
    fields: dict[str, Any] = {"model": "fake", "messages": HI, "max_completion_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields, logprobs=True, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot  # get_final_completion objects to an end by length
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == whole.message.content
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert len(final.choices[0].logprobs.content) == 6
    assert final.usage is not None
    with client.chat.completions.create(**fields, stream=True) as chunks:
        assert next(iter(chunks)).choices[0].delta.role == "assistant"


async def test_many_at_once(server: Server) -> None:
    """The asynchronous client: streams side by side, each with the answer that it gets alone."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="fake", messages=HI, seed=seed, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        together = await asyncio.gather(*map(one, range(8)))
        assert together == [await one(seed) for seed in range(8)]
        assert len(set(together)) == 8
        assert [model.id async for model in client.models.list()] == ["fake"]


# ---- parsed answers ----


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Part(BaseModel):
    name: str = Field(max_length=12)
    count: int = Field(ge=0, le=20)


class Toy(BaseModel):
    """A toy."""

    colour: Colour
    kind: Literal["ball", "car"]
    parts: list[Part] = Field(max_length=2)
    weight: float | None
    spare: Part | None = None
    bought: datetime.date


class Find(BaseModel):
    """Finds a word."""

    word: str = Field(max_length=8)
    how: Literal["exact", "near"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_parsed_answers(real: openai.OpenAI) -> None:
    """A pydantic model as response format: whole and streamed, the answer is an instance of it."""
    fields: dict[str, Any] = {"model": "fake", "messages": ASK, "max_tokens": 400, "seed": 3, "temperature": 0.7}
    message: Any = real.chat.completions.parse(**fields, response_format=Toy).choices[0].message
    parsed = message.parsed
    assert isinstance(parsed, Toy)
    more = [*ASK, message, {"role": "user", "content": "Another one."}]  # as it came: with what was parsed in it
    assert real.chat.completions.create(model="fake", messages=more, max_tokens=1).choices
    with real.chat.completions.stream(**fields, response_format=Toy) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    assert kinds.count("content.delta") > 5
    with pytest.raises(openai.LengthFinishReasonError):
        real.chat.completions.parse(**fields | {"max_tokens": 3}, response_format=Toy)


def test_parsed_calls(real: openai.OpenAI) -> None:
    """A pydantic model as a tool: forced calls have arguments of its type, streamed piece by piece too."""
    tools = [openai.pydantic_function_tool(Find, name="find")]
    named = {"type": "function", "function": {"name": "find"}}
    for choice in ("required", named):
        fields: dict[str, Any] = {
            "model": "fake",
            "messages": ASK,
            "max_tokens": 200,
            "seed": 3,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }
        answer = real.chat.completions.parse(**fields).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Find)
        with real.chat.completions.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function == call.function
        assert kinds.count("tool_calls.function.arguments.delta") > 3
        assert kinds.count("tool_calls.function.arguments.done") == 1


def test_a_tool_is_called_and_answered(tmp_path: Path) -> None:
    """The whole round: the model calls, the client's own message objects go back with the result, the model goes on."""
    template = "<empty_output>{{ messages[-1].content }}"  # the scripted model says what it was told last
    say = 'Wait.\n<tool_call>\n{"name": "find", "arguments": {"word": "it", "how": "near"}}\n</tool_call>'
    tools: Any = [openai.pydantic_function_tool(Find, name="find")]
    messages: list[Any] = [{"role": "user", "content": say}]
    with running(write_model(tmp_path / "m", template=template)) as server, connect(server) as client:
        message = client.chat.completions.parse(model="fake", messages=messages, tools=tools).choices[0].message
        assert message.content == "Wait.\n"
        assert message.tool_calls is not None
        [call] = message.tool_calls
        assert call.function.parsed_arguments == Find(word="it", how="near")
        messages += [message, {"role": "tool", "content": "found", "tool_call_id": call.id}]
        assert client.chat.completions.create(model="fake", messages=messages, tools=tools).choices[0].message.content
        with client.chat.completions.stream(model="fake", messages=messages[:1], tools=tools) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            final = stream.get_final_completion().choices[0]
        assert text == final.message.content == "Wait.\n"
        assert final.message.tool_calls is not None
        assert final.message.tool_calls[0].function == call.function
        assert final.finish_reason == "tool_calls"


# ---- models and errors ----


def test_models(client: openai.OpenAI) -> None:
    """The list, and one of them."""
    [model] = client.models.list()
    assert model == client.models.retrieve("fake")
    assert model.object == "model"


def test_errors_are_the_exceptions_that_clients_expect(client: openai.OpenAI) -> None:
    """400 and 404 with the field's name; what hopon does not serve is a 404 too, not a failure."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HI, temperature=-1)
    assert (bad.value.param, bad.value.status_code, bad.value.type) == ("temperature", 400, "BadRequestError")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert missing.value.param == "model"
    for call in (
        lambda: client.embeddings.create(model="fake", input="x"),
        lambda: client.responses.create(model="fake", input="x"),
        lambda: client.files.list(),
        lambda: client.models.retrieve("gpt-4"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_refusals_are_the_exceptions_that_clients_expect(strict: Server) -> None:
    """A wrong key, a client that does not wait any longer, a full queue with a time to come back."""
    with connect(strict, key="sk-wrong") as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with connect(strict, key="sk-right") as client, client.completions.create(**LONG, stream=True) as first:
        next(iter(first))
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**LONG, timeout=0.1)
        eventually(lambda: strict.metrics()["hopon_queue_places"] == 0)
        with strict.begin({"prompt": [99], "max_tokens": 900}, key="sk-right"):
            eventually(lambda: strict.metrics()["hopon_queue_places"] == 1)
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(**LONG)
        assert int(full.value.response.headers["retry-after"]) >= 1
    eventually(lambda: strict.num_busy() == 0)
