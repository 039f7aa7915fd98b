"""Tool definitions, the words that models hear of them, and the calls in what models say."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from hopon.core.types import FinishReason, Guide
from hopon.model.guide import Guides
from hopon.serve.chat import describe
from hopon.serve.structured import FieldError
from hopon.serve.tokenizer import Tokenizer
from hopon.serve.tools import (
    CallArguments,
    CallBegin,
    CallParser,
    Content,
    NamedTool,
    Piece,
    Tool,
    ToolCall,
    ToolUse,
    tool_use,
)

NAMES = frozenset(("find", "add"))
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}, "limit": {"type": "integer", "maximum": 9}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def tools(*given: dict[str, Any]) -> list[Tool]:
    return [Tool.model_validate(tool) for tool in given]


def use(*given: dict[str, Any], choice: Any = None, parallel: bool | None = None) -> ToolUse:
    if isinstance(choice, dict):
        choice = NamedTool.model_validate(choice)
    found = tool_use(tools(*given), choice, parallel)
    assert found is not None
    return found


def read(texts: Sequence[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in parts."""
    parser = CallParser(NAMES, most)
    pieces: list[Piece] = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    content = ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = calls[index][0], calls[index][1] + text
    assert parser.num_calls == len(calls)
    return content, calls


CASES = {
    "plain": ("Just text.", "Just text.", []),
    "blank": (" \n", " \n", []),
    "leading blanks": ("\n\n Text", "\n\n Text", []),
    "one": ('<tool_call>\n{"name": "find", "arguments": {"word": "a"}}\n</tool_call>', "", [("find", '{"word": "a"}')]),
    "text before": (
        'Let me see.\n<tool_call>{"name":"add","arguments":{}}</tool_call>',
        "Let me see.\n",
        [("add", "{}")],
    ),
    "two": (
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "add", "arguments": '
        '{"n": 1}}\n</tool_call>\n',
        "",
        [("find", "{}"), ("add", '{"n": 1}')],
    ),
    "text behind": ('<tool_call>{"name": "add", "arguments": {}}</tool_call> Done.', " Done.", [("add", "{}")]),
    "no end mark": ('<tool_call>\n{"name": "add", "arguments": {"n": 2}}', "", [("add", '{"n": 2}')]),
    "no end mark, next": (
        '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "find", "arguments": {}}',
        "",
        [("add", "{}"), ("find", "{}")],
    ),
    "marks and braces in strings": (
        '<tool_call>{"name": "find", "arguments": {"word": "</tool_call>}\\"{<tool_call>"}}</tool_call>',
        "",
        [("find", '{"word": "</tool_call>}\\"{<tool_call>"}')],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"n": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"n": 1}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"n\\": 1}"}</tool_call>',
        "",
        [("add", '{"n": 1}')],
    ),
    "parameters": ('<tool_call>{"name": "add", "parameters": {"n": 1}}</tool_call>', "", [("add", '{"n": 1}')]),
    "unknown function": (
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        [],
    ),
    "no JSON": ("<tool_call>find it</tool_call>", "<tool_call>find it</tool_call>", []),
    "not an object": ("<tool_call>[1]</tool_call> x", "<tool_call>[1]</tool_call> x", []),
    "broken head": ('<tool_call>{"name": find}</tool_call>', '<tool_call>{"name": find}</tool_call>', []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "cut in the head": ('<tool_call>{"name": "fi', '<tool_call>{"name": "fi', []),
    "cut in the mark": ("Text <tool_c", "Text <tool_c", []),
    "cut in the arguments": ('<tool_call>{"name": "add", "arguments": {"n": ', "", [("add", '{"n": ')]),
    "arguments without an end": (
        '<tool_call>{"name": "add", "arguments": {"n": 1</tool_call>, then',
        ", then",
        [("add", '{"n": 1')],
    ),
    "almost a mark": ("a <tool_cal> b <too", "a <tool_cal> b <too", []),
    "two marks": ("<<tool_call>x", "<<tool_call>x", []),
    "a malformed one, then a good one": (
        '<tool_call>oh <tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<tool_call>oh ",
        [("add", "{}")],
    ),
    "end mark alone": ("a </tool_call> b", "a </tool_call> b", []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    """Content and calls are the same for the whole text, for single characters, and for random parts."""
    text, content, calls = CASES[name]
    assert read([text]) == (content, calls)
    assert read(list(text)) == (content, calls)
    rng = random.Random(name)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 5)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(parts) == (content, calls)


def test_nothing_is_held_back_longer_than_needed() -> None:
    """Text comes out up to a possible mark; a name once its arguments begin, arguments character by character."""
    parser = CallParser(NAMES)
    assert parser.push("Hi <") == [Content("Hi ")]
    assert parser.push("b") == [Content("<b")]
    assert parser.push("<tool_call>\n") == []
    assert parser.push('{"name": "add"') == []
    assert parser.push(', "arguments": ') == []
    assert parser.push("{") == [CallBegin(0, "add"), CallArguments(0, "{")]
    assert parser.push('"n') == [CallArguments(0, '"n')]
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.push("<tool_call>no") == [Content("<tool_call>"), Content("no")]


def test_calls_beyond_the_most_are_content() -> None:
    """With at most one call the second one is ordinary text."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read([call + call], most=1) == (call, [("add", "{}")])


def test_what_the_fields_come_to() -> None:
    """No tools or none chosen is no use of them; a named one is alone, and once."""
    assert tool_use(None, None, None) is None
    assert tool_use([], "auto", True) is None
    assert tool_use(tools(FIND), "none", None) is None
    auto = use(FIND)
    assert auto.guide is None
    assert not auto.is_forced
    assert auto.most is None
    assert auto.names == {"find"}
    assert use(FIND, parallel=False).most == 1
    named = use(FIND, ADD, choice={"type": "function", "function": {"name": "add"}})
    assert named.is_forced
    assert named.most == 1
    assert named.names == {"find", "add"}


@pytest.mark.parametrize(
    ("given", "choice", "param", "message"),
    [
        ([], "required", "tool_choice", "needs tools"),
        ([FIND], {"type": "function", "function": {"name": "lose"}}, "tool_choice", "'lose'"),
        ([FIND, FIND], None, "tools", "different names"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {"lenient": True}}}}],
            "required",
            "tools",
            "'f'",
        ),
    ],
)
def test_fields_that_contradict_each_other(given: Any, choice: Any, param: str, message: str) -> None:
    """Each is refused with the field and the reason."""
    with pytest.raises(FieldError, match=message) as caught:
        tool_use(tools(*given), NamedTool.model_validate(choice) if isinstance(choice, dict) else choice, None)
    assert caught.value.param == param


def walk(guide: Guide, tokenizer: Tokenizer, seed: int, most: int = 3000) -> tuple[str, FinishReason | None]:
    """A random output under a guide."""
    from tests.model.test_guide import allowed

    follower = Guides(lambda: tokenizer.vocabulary, tokenizer.vocab_size).follow(guide, (), (2,))
    rng = random.Random(seed)
    tokens: list[int] = []
    while follower.finish is None and len(tokens) < most:
        tokens.append(rng.choice(allowed(follower, tokenizer.vocab_size)))
        follower.take(tokens[-1])
    return tokenizer.decode(tokens), follower.finish


@pytest.mark.parametrize("parallel", [None, False])
def test_forced_outputs_are_calls(tokenizer: Tokenizer, parallel: bool | None) -> None:
    """Whatever a model says under a forced call is read as calls whose arguments keep to their schemas."""
    forced = use(FIND, ADD, NOW, choice="required", parallel=parallel)
    assert forced.guide is not None
    counts = set()
    for seed in range(6):
        text, finish = walk(forced.guide, tokenizer, seed)
        assert finish is FinishReason.STOP, text[:500]
        parser = CallParser(forced.names, forced.most)
        pieces = parser.push(text) + parser.finish()
        assert not [piece for piece in pieces if isinstance(piece, Content)]
        for index in range(parser.num_calls):
            arguments = json.loads("".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == index))
            name = next(p.name for p in pieces if isinstance(p, CallBegin) and p.index == index)
            required = {"find": {"word"}, "add": {"n"}, "now": set()}[name]
            assert required <= arguments.keys()
            assert name != "now" or arguments == {}
        counts.add(parser.num_calls)
    assert counts == {1} if parallel is False else max(counts) <= 16


def test_strict_calls_among_text_keep_to_their_schema(tokenizer: Tokenizer) -> None:
    """With a strict function a model may say anything, but not a call mark without a call that keeps to the schema."""
    auto = use(ADD)
    assert auto.guide is not None
    assert not auto.is_forced
    ids = [token for text in ("Well: <tool_call>\n", '{"name": "') for token in tokenizer.encode(text)]
    guides = Guides(lambda: tokenizer.vocabulary, tokenizer.vocab_size)
    assert guides.follow(auto.guide, ids, (2,)).finish is None
    good = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n</tool_call> Done.')
    assert guides.follow(auto.guide, good, (2,)).finish is None
    for bad in ("<tool_call>\nadd", '<tool_call>\n{"name": "sub', '<tool_call>\n{"name": "add", "arguments": {"n": 3'):
        assert guides.follow(auto.guide, tokenizer.encode(bad), (2,)).finish is FinishReason.REFUSED


def test_a_conversation_in_words() -> None:
    """For a template without tools: tools in the system prompt, calls as text, results as what the user says."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"n": 1}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "b"},
    ]
    first, *rest = describe(messages, use(FIND).described())
    assert first["role"] == "system"
    assert '"find"' in first["content"]
    assert rest == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'},
        {
            "role": "user",
            "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>",
        },
    ]
    [merged, _] = describe([{"role": "system", "content": "Be kind."}, messages[0]], use(FIND).described())
    assert merged["content"].startswith("Be kind.\n\n")


@pytest.mark.parametrize("arguments", ["{", "[1]", "nothing"])
def test_calls_in_messages_have_objects(arguments: str) -> None:
    """A call that a client sends back must have arguments that are a JSON object; the error says where."""
    call = ToolCall.model_validate({"id": "a", "function": {"name": "add", "arguments": arguments}})
    with pytest.raises(FieldError, match=r"messages\[1\].tool_calls\[0\]"):
        call.described("messages[1].tool_calls[0]")
