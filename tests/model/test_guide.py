"""Guides without a model: whatever a mask allows leads to an output that keeps to the guide, at a bounded cost."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from hopon.core.types import FinishReason, Guide, GuideKind
from hopon.model.guide import MAX_GUIDE_CHARS, Follower, GuideError, Guides
from hopon.model.vocabulary import Vocabulary, read_vocabulary, spell

STOPS = (0, 2)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}, "open": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return read_vocabulary(smollm2)


@pytest.fixture(scope="module")
def guides(vocabulary: Vocabulary) -> Guides:
    return Guides(lambda: vocabulary, len(vocabulary.pieces))


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


def allowed(follower: Follower, size: int) -> list[int]:
    bits = np.unpackbits(follower.mask.view(np.uint8), bitorder="little", count=size)
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids


def walk(
    guides: Guides, vocabulary: Vocabulary, guide: Guide, seed: int, most: int = 400, stops: tuple[int, ...] = STOPS
) -> tuple[list[int], bytes, Follower]:
    """Any allowed token, again and again, until the output ends."""
    rng = random.Random(seed)
    spelling = spell(vocabulary)
    follower = guides.follow(guide, (), stops)
    tokens: list[int] = []
    while follower.finish is None and len(tokens) < most:
        token = rng.choice(allowed(follower, len(vocabulary.pieces)))
        tokens.append(token)
        follower.take(token)
    text = tokens[:-1] if tokens and tokens[-1] in stops else tokens
    return tokens, b"".join(spelling[token] for token in text), follower


def test_any_walk_under_a_schema_is_an_instance(
    guides: Guides, vocabulary: Vocabulary, effort: Callable[[int, int], int]
) -> None:
    """Random walks under a schema end in JSON that parses and validates."""
    for seed in range(effort(20, 1000)):
        _, text, follower = walk(guides, vocabulary, schema(PERSON), seed)
        assert follower.finish is FinishReason.STOP
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("pattern", [r"\d{4}-\d{2}-\d{2}", "(yes|no)!?", "^[a-f]{3}$", "a/b\"c'\\\\", "x?", "é+\n"])
def test_any_walk_under_a_regular_expression_matches(guides: Guides, vocabulary: Vocabulary, pattern: str) -> None:
    """Random walks match the whole expression; one that could go on for ever ends by a stop token."""
    for seed in range(10):
        tokens, text, follower = walk(guides, vocabulary, Guide(GuideKind.REGEX, pattern), seed, most=5000)
        assert follower.finish is FinishReason.STOP
        assert re.fullmatch(pattern, text.decode())
        assert not set(tokens[:-1]) & set(STOPS)


def test_choices_are_taken_as_they_are(guides: Guides, vocabulary: Vocabulary) -> None:
    """Every choice is found, whatever is in it, and nothing else; control tokens are no way to spell one."""
    choices = ["a", "ab", 'say "hi"\\', "zwei\nZeilen", "<|im_end|>", "\u00e9\U0001f600", ""]
    guide = Guide(GuideKind.CHOICE, json.dumps(choices))
    found = {walk(guides, vocabulary, guide, seed)[1].decode() for seed in range(150)}
    assert found == set(choices)


def test_grammars_in_both_notations(guides: Guides, vocabulary: Vocabulary) -> None:
    """A Lark-like grammar and the same in GBNF allow the same walks."""
    lark = 'start: "(" digit ("," digit)* ")"\ndigit: /[0-9]/'
    gbnf = 'root ::= "(" digit ("," digit)* ")"\ndigit ::= [0-9]'
    for grammar in (lark, gbnf):
        for seed in range(10):
            _, text, _ = walk(guides, vocabulary, Guide(GuideKind.GRAMMAR, grammar), seed, most=2000)
            assert re.fullmatch(rb"\(\d(,\d)*\)", text)


def test_json_objects(guides: Guides, vocabulary: Vocabulary) -> None:
    """A walk under json_object that ended is an object."""
    ended = 0
    for seed in range(40):
        _, text, follower = walk(guides, vocabulary, Guide(GuideKind.JSON_OBJECT, ""), seed, most=60)
        assert text.lstrip().startswith(b"{")
        if follower.finish is FinishReason.STOP:
            assert isinstance(json.loads(text), dict)
            ended += 1
    assert ended


def test_following_anew_gives_the_same_masks(guides: Guides, vocabulary: Vocabulary) -> None:
    """A follower that is opened with an output so far allows what the one that went along allows."""
    tokens, _, _ = walk(guides, vocabulary, schema(PERSON), 3)
    along = guides.follow(schema(PERSON), (), STOPS)
    for count in range(len(tokens)):
        anew = guides.follow(schema(PERSON), tokens[:count], STOPS)
        assert (anew.mask == along.mask).all()
        assert anew.finish is along.finish
        along.take(tokens[count])


def test_stop_tokens_only_where_the_guide_may_end(guides: Guides, vocabulary: Vocabulary) -> None:
    """The end is allowed behind the second letter, not behind the first, and not at all without stop tokens."""
    guide = Guide(GuideKind.REGEX, "ab+")
    a, b = (spell(vocabulary).index(letter) for letter in (b"a", b"b"))
    follower = guides.follow(guide, [a], STOPS)
    assert not set(STOPS) & set(allowed(follower, 49152))
    follower.take(b)
    assert set(STOPS) <= set(allowed(follower, 49152))
    assert follower.finish is None
    follower.take(2)
    assert follower.finish is FinishReason.STOP
    assert not set(STOPS) & set(allowed(guides.follow(guide, [a, b], ()), 49152))


def test_a_guide_that_no_token_can_follow_is_refused_on_the_way(guides: Guides) -> None:
    """SmolLM has no token with the byte 0x14: the output ends as refused, with something left in the mask."""
    follower = guides.follow(Guide(GuideKind.REGEX, "\x14"), (), STOPS)
    assert follower.finish is FinishReason.REFUSED
    assert "no token of this model" in follower.message
    assert follower.mask.any()


def test_ids_behind_the_vocabulary_are_never_allowed(vocabulary: Vocabulary) -> None:
    """A model with more logits than tokens, a multiple of 32 or not, samples no token without a meaning."""
    for more in (0, 1, 31, 32, 100):
        size = len(vocabulary.pieces) + more
        follower = Guides(lambda: vocabulary, size).follow(Guide(GuideKind.REGEX, r"(.|\n)*"), (), (size - 1,))
        ids = allowed(follower, len(follower.mask) * 32)
        assert max(ids) == size - 1  # the stop token
        assert ids[-2] < len(vocabulary.pieces)


def test_without_a_vocabulary_guides_are_refused() -> None:
    """A model whose vocabulary cannot be read serves everything but guides."""

    def read() -> Vocabulary:
        raise OSError("tokenizer.json: no such file")

    guides = Guides(read, 100)
    assert guides.follow(Guide(GuideKind.REGEX, "a")).finish is FinishReason.REFUSED
    with pytest.raises(GuideError, match="no such file"):
        guides.check(Guide(GuideKind.REGEX, "a"))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (schema({"type": "array", "uniqueItems": True}), 'not supported: "uniqueItems"'),
        (schema({"properties": {"a": {"not": {"type": "string"}}}}), 'not supported: "not"'),
        (schema({"type": "string", "format": "weird"}), "Unknown format: weird"),
        (schema({"type": "string", "x-guidance": {"lenient": True}}), "x-guidance"),
        (schema({"$ref": "#/nowhere"}), "nowhere"),
        (schema({"$ref": "#"}), "cannot be followed"),
        (schema([]), "must be an object"),
        (schema(False), "must be an object"),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "not valid JSON"),
        (Guide(GuideKind.REGEX, "(a"), "unclosed group"),
        (Guide(GuideKind.REGEX, "(?=a)b"), "look-ahead"),
        (Guide(GuideKind.REGEX, r"(a)\1"), "backreferences"),
        (Guide(GuideKind.GRAMMAR, "start: nothing"), "nothing"),
        (Guide(GuideKind.GRAMMAR, 'start: "a"\n%llguidance {"no_forcing": false}'), "%llguidance"),
        (Guide(GuideKind.GRAMMAR, ""), "grammar"),
        (Guide(GuideKind.CHOICE, "[]"), "at least one"),
        (Guide(GuideKind.CHOICE, '"a"'), "at least one"),
        (Guide(GuideKind.CHOICE, '["\\ud800"]'), "surrogate"),
        (Guide(GuideKind.REGEX, "\ud800"), "surrogate"),
        (Guide(GuideKind.GRAMMAR, 'start: "\ud800"'), "surrogate"),
        (schema({"const": "\ud800"}), "JSON schema"),
        (schema({"x-guidance": {"whitespace_pattern": "("}}), "unclosed group"),
        (Guide(GuideKind.JSON_SCHEMA, '{"items":' * 900 + "{}" + "}" * 900), "JSON schema"),
    ],
)
def test_v074_what_is_wrong_with_a_guide(guides: Guides, guide: Guide, message: str) -> None:
    """A guide that is not valid, or uses what is not supported, is refused with a sentence that names it."""
    with pytest.raises(GuideError, match=re.escape(message)):
        guides.check(guide)
    guides.check(schema(PERSON))


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def _doubling(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        value = {"anyOf": [value, {"type": "array", "items": value}]}
    return value


HOSTILE = {
    "deep": schema(_nested(300)),
    "deeper than Python": Guide(GuideKind.JSON_SCHEMA, '{"items":' * 50_000 + "{}" + "}" * 50_000),
    "doubling": schema(_doubling(16)),
    "product": schema(
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{i}": {"const": j}}} for j in range(4)]}
                for i in range(6)
            ]
        }
    ),
    "wide": schema(
        {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": "^[a-z]*$"} for i in range(2000)}}
    ),
    "huge enum": schema({"enum": [f"value {i}" for i in range(50_000)]}),
    "intersection": Guide(GuideKind.GRAMMAR, "start: T\nT: /(.*a.{30})/ & /(.*b.{30})/ & ~/(.*ab.{20})/"),
    "long": Guide(GuideKind.REGEX, "a" * (MAX_GUIDE_CHARS + 1)),
    "remainders": schema({"type": "integer", "multipleOf": 999_983}),
    "remainders of remainders": schema({"allOf": [{"multipleOf": 9.73, "items": {"multipleOf": 0.0991}}]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_guides_are_refused(guides: Guides, name: str) -> None:
    """What would cost too much to compile is refused, within a bounded CPU time."""
    start = time.thread_time()
    with pytest.raises(GuideError):
        guides.check(HOSTILE[name])
    assert time.thread_time() - start < 20  # not a measure of speed: these would take minutes, or all memory
    guides.check(schema(PERSON))


@pytest.mark.parametrize(
    "pattern",
    [
        "a{100000}",
        "((a{100}){100}){100}",
        "(a|aa)+b",
        "(x+x+)+y",
        "([ab]*a[ab]{200})|([bc]*b[bc]{200})",
        r"(\w+\s+){50}",
    ],
)
def test_expressions_that_backtrackers_fear_are_followed(guides: Guides, vocabulary: Vocabulary, pattern: str) -> None:
    """Repetitions and ambiguity cost nothing per token: they are accepted, and walks go on."""
    guides.check(Guide(GuideKind.REGEX, pattern))
    tokens, _, follower = walk(guides, vocabulary, Guide(GuideKind.REGEX, pattern), 1, most=200)
    assert tokens
    assert follower.finish in (None, FinishReason.STOP)


def test_work_per_token_is_bounded(guides: Guides, vocabulary: Vocabulary) -> None:
    """An ambiguous grammar whose parses multiply is given up on the way, as refused."""
    grammar = 'start: e\ne: e e | "(" e ")" | "a" | e "+" e | e "*" e | '
    follower = walk(guides, vocabulary, Guide(GuideKind.GRAMMAR, grammar), 1, most=400, stops=())[2]
    assert follower.finish is FinishReason.REFUSED
    assert "Too many items" in follower.message
