"""Structured outputs and tools over HTTP: a real model under guides, and scripted answers with calls in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import Server, at_once, running, text_of, write_model
from tests.serve.test_tools import ADD, FIND

SMALL = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Describe a ball as JSON."}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"word": "a b"}}\n</tool_call>'

QWEN_LIKE = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
As in <tool_call>...</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}|{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Server]:
    engine = {"dtype": "q4", "max_model_len": 512, "max_num_seqs": 8, "num_kv_blocks": 256}
    with running(smollm2, factory="hopon.model.cpu:load", engine=engine) as server:
        yield server


def response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


GUIDED: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": response_format(SMALL)},
    "structured json": {"structured_outputs": {"json": SMALL}},
    "json as text": {"structured_outputs": {"json": json.dumps(SMALL), "disable_any_whitespace": True}},
    "guided_json": {"guided_json": SMALL},
    "regex": {"structured_outputs": {"regex": r"\d{3}-[a-f]{1,5}!"}},
    "guided_regex": {"guided_regex": r"\d{3}-[a-f]{1,5}!"},
    "choice": {"structured_outputs": {"choice": ["one", "two", "twenty"]}},
    "guided_choice": {"guided_choice": ["one", "two", "twenty"]},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "<" [xyz]{2,4} ">"'}},
    "guided_grammar": {"guided_grammar": 'start: "<" /[xyz]{2,4}/ ">"'},
}


def keeps_to(name: str, text: str) -> None:
    if "json" in name or name == "response_format":
        jsonschema.validate(json.loads(text), SMALL)
    elif "regex" in name:
        assert re.fullmatch(r"\d{3}-[a-f]{1,5}!", text)
    elif "choice" in name:
        assert text in ("one", "two", "twenty")
    else:
        assert re.fullmatch("<[xyz]{2,4}>", text)
    if name == "json as text":
        assert not re.search(r"\s", text)


def test_every_way_to_ask_for_structure(real: Server) -> None:
    """All fields, in both endpoints, whole and streamed, greedy and by chance, with penalties: all at the same time."""
    cases = [
        (name, chat, extras)
        for name in GUIDED
        for chat in (False, True)
        for extras in ({"temperature": 0}, {"seed": 3, "temperature": 1.3, "frequency_penalty": 0.5, "logprobs": 1})
    ]

    def check(number: int) -> None:
        name, chat, extras = cases[number]
        if chat and "logprobs" in extras:
            extras = extras | {"logprobs": True}
        path = "chat/completions" if chat else "completions"
        body = {"max_tokens": 200, **({"messages": ASK} if chat else {"prompt": "A ball:"}), **extras, **GUIDED[name]}
        response = real.post(path, **body)
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        assert choice["finish_reason"] == "stop", (name, text)
        keeps_to(name, text)
        assert text_of(real.stream(path, **body)) == text

    at_once(8, lambda worker: list(map(check, range(worker, len(cases), 8))))


def test_n_answers_each_keep_to_the_guide(real: Server) -> None:
    """Several answers of one prompt are guided each; alone under the same seed the first is the same."""
    body = {"prompt": "A ball:", "guided_json": SMALL, "seed": 5, "max_tokens": 200}
    choices = real.complete(n=3, **body)["choices"]
    for choice in choices:
        jsonschema.validate(json.loads(choice["text"]), SMALL)
    assert real.complete(**body)["choices"][0]["text"] == choices[0]["text"]


def test_lengths_stops_and_ends_of_guided_outputs(real: Server) -> None:
    """max_tokens cuts with "length", a stop string cuts; ignore_eos and min_tokens do not prolong what is complete."""
    body: dict[str, Any] = {"prompt": "A ball:", "temperature": 0}
    [cut] = real.complete(**body, guided_regex="[a-z]{100}", max_tokens=3)["choices"]
    assert cut["finish_reason"] == "length"
    [stopped] = real.complete(**body, guided_regex="abc-xyz", max_tokens=30, stop="-x")["choices"]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("abc", "stop", "-x")
    for extras in ({"ignore_eos": True}, {"min_tokens": 20}):
        answer = real.complete(**body, guided_regex="abc", max_tokens=30, **extras)
        assert answer["choices"][0]["text"] == "abc"
        assert answer["choices"][0]["finish_reason"] == "stop"
    empty = real.complete(**body, guided_regex="", max_tokens=30)
    assert empty["choices"][0]["text"] == ""
    assert empty["choices"][0]["finish_reason"] == "stop"
    longer = real.complete(**body, guided_regex="(ab)*", max_tokens=30, min_tokens=10)
    assert longer["usage"]["completion_tokens"] > 10


def test_v074_a_bad_guide_is_the_only_one_refused(real: Server) -> None:
    """Valid, invalid, valid, at the same time, of every kind: 400 for the invalid one only, and the server lives."""
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": response_format({"uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", '"not"'),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", "b"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"guided_json": "{"}, "structured_outputs", "not valid JSON"),
        ({"guided_regex": "\x14"}, "guided_regex", "no token"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "200000 characters"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exclude each other"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "guide"),
    ]

    def check(number: int) -> None:
        extras, param, message = bad[number]
        for stream in (False, True):
            real.complete("x", guided_choice=["one", "two"], max_tokens=8)
            error = real.refused(prompt="x", stream=stream, **extras)
            assert error["param"] == param, error
            assert message in error["message"]

    at_once(4, lambda worker: list(map(check, range(worker, len(bad), 4))))
    keeps_to("choice", real.complete("x", guided_choice=["one", "two"], max_tokens=8)["choices"][0]["text"])


def test_neutral_structure_is_none(server: Server) -> None:
    """Null, text and empty fields change nothing."""
    plain = server.complete("One", seed=1)["choices"]
    neutral: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
    ]
    for extras in neutral:
        assert server.complete("One", seed=1, **extras)["choices"] == plain


# ---- tools ----


def gathered(chunks: list[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]], str | None]:
    """Content, calls and finish reason of a stream, put together as clients do."""
    content, finish = "", None
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            content += choice["delta"].get("content") or ""
            for news in choice["delta"].get("tool_calls", []):
                if news["index"] == len(calls):
                    assert news["type"] == "function"
                    assert news["id"].startswith("call_")
                    calls.append({"name": news["function"]["name"], "arguments": ""})
                else:
                    assert "id" not in news
                    assert "name" not in news["function"]
                calls[news["index"]]["arguments"] += news["function"]["arguments"]
    return content or None, calls, finish


def whole(answer: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]], str]:
    [choice] = answer["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return choice["message"]["content"], calls, choice["finish_reason"]


def test_forced_calls_of_a_real_model(real: Server) -> None:
    """required and named calls are calls with valid arguments, whole and streamed alike; ids differ."""
    body = {"messages": ASK, "tools": [FIND, ADD], "max_tokens": 250, "seed": 4, "temperature": 0.8}
    named = {"type": "function", "function": {"name": "find"}}
    for choice, parallel in (("required", False), (named, True)):
        answer = real.chat(**body, tool_choice=choice, parallel_tool_calls=parallel)
        content, [call], finish = whole(answer)
        assert content is None
        assert finish == "tool_calls"
        assert choice == "required" or call["name"] == "find"
        schema = {"find": FIND, "add": ADD}[call["name"]]["function"]["parameters"]  # type: ignore[index]
        jsonschema.validate(json.loads(call["arguments"]), schema)
        chunks = real.stream("chat/completions", **body, tool_choice=choice, parallel_tool_calls=parallel)
        assert gathered(chunks) == (None, [call], "tool_calls")
        assert answer["choices"][0]["message"]["tool_calls"][0]["type"] == "function"


def test_forced_calls_with_the_openai_client(real: Server) -> None:
    """The official client reads forced calls, whole and streamed, and a schema as response format."""
    client: Any = openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
    common: dict[str, Any] = {"model": "fake", "messages": ASK, "seed": 1, "max_tokens": 200}
    answer = client.chat.completions.create(**common, tools=[FIND], tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    assert "word" in json.loads(call.function.arguments)
    with client.chat.completions.stream(
        **common, tools=[FIND], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    shaped = client.chat.completions.create(**common, response_format=response_format(SMALL))
    jsonschema.validate(json.loads(shaped.choices[0].message.content), SMALL)


def test_calls_that_a_model_makes_by_itself(tmp_path: Path) -> None:
    """Under auto, content and calls of a scripted answer are the same whole and streamed; one call ends an answer."""
    folder = write_model(tmp_path / "scripted", template="<empty_output>{{ messages[-1].content }}")
    with running(folder) as scripted:
        for text, content, count in ((CALL, None, 1), (f"See: {CALL}\n{CALL}", "See: ", 2), ("No call <too", None, 0)):
            content = content if count else text
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200}
            call = {"name": "find", "arguments": '{"word": "a b"}'}
            expected = (content, [call] * count, "tool_calls" if count else "stop")
            assert whole(scripted.chat(**body, tools=[FIND])) == expected
            assert gathered(scripted.stream("chat/completions", **body, tools=[FIND])) == expected
            assert whole(scripted.chat(**body)) == (text, [], "stop")
            single = scripted.chat(**body, tools=[FIND], parallel_tool_calls=False)
            assert whole(single) == (content, [call] * min(count, 1), expected[2])
            assert single["choices"][0]["stop_reason"] is None


@pytest.fixture(scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A fake model whose chat template is one that knows tools, and whose prompt ends with what it is to say."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tools", template=QWEN_LIKE)
    with running(folder) as server:
        yield server


def test_prompts_show_tools_through_the_template(echoing: Server, tokenizer: Tokenizer) -> None:
    """A template that knows tools shows them, calls with arguments as objects, and results."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Find it."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"word": "it"}'}}
            ],
        },
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]
    answer = echoing.chat(messages, tools=[FIND], return_token_ids=True, max_tokens=1)
    text = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert '"description": "Finds a word."' in text
    assert '<tool_call>find|{"word": "it"}</tool_call>' in text
    assert "<|im_start|>tool\nfound<|im_end|>" in text
    none = echoing.chat(messages, tools=[FIND], tool_choice="none", return_token_ids=True, max_tokens=1)
    assert "# Tools" not in tokenizer.decode(none["prompt_token_ids"])


def test_a_template_without_tools_gets_words(server: Server, tokenizer: Tokenizer) -> None:
    """SmolLM's template knows no tools: they are in the system prompt, a result is what the user says."""
    messages = [{"role": "user", "content": "Find it."}, {"role": "tool", "content": "found", "tool_call_id": "c1"}]
    answer = server.chat(messages, tools=[FIND], return_token_ids=True, max_tokens=1)
    text = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert text.index("<|im_start|>system") < text.index('"find"') < text.index("Find it.")
    assert "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>" in text


def test_v071_null_content_beside_calls(server: Server) -> None:
    """An assistant message with calls may have null content; anybody else's may not."""
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    server.chat([{"role": "user", "content": "Hi"}, turn, {"role": "tool", "content": "x", "tool_call_id": "a"}])
    server.refused("chat/completions", messages=[{"role": "tool", "content": None}])


@pytest.mark.parametrize(
    ("extras", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes", "tools": [FIND]}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [FIND]}, "tool_choice", "'no'"),
        ({"tools": [FIND, FIND]}, "tools", "different names"),
        ({"tools": [{"type": "retrieval"}]}, "tools", "type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tools"),
        ({"tools": [FIND], "response_format": {"type": "json_object"}}, "response_format", "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "'f' in tools: the JSON schema uses keys that are not supported: \"not\"",
        ),
    ],
)
def test_tools_that_are_refused(server: Server, extras: dict[str, Any], param: str, message: str) -> None:
    """A 400 names the field and says what is wrong with it."""
    error = server.refused("chat/completions", messages=ASK, **extras)
    assert error["param"] == param, error
    assert message in error["message"]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "assistant"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, "not valid JSON"),
        ({"role": "function", "name": "f", "content": "x"}, "role 'tool'"),
    ],
)
def test_messages_that_are_refused(server: Server, turn: dict[str, Any], message: str) -> None:
    """Calls and results belong to their roles, and arguments are JSON."""
    error = server.refused("chat/completions", messages=[*ASK, turn])
    assert error["param"] == "messages"
    assert message in error["message"]
