"""Guides at work: which tokens keep an output to a JSON schema, a regular expression, a grammar or a choice.

llguidance (https://github.com/guidance-ai/llguidance: an Earley parser over derivatives of regular expressions) does
the parsing, behind a small interface: :class:`Guides` compiles the guides of one vocabulary, a :class:`Follower` goes
along with one output. Every guide becomes a Lark-like grammar without forced tokens: a mask says what may come next,
the model chooses. What a guide may cost is bounded: its length, the time and size of its compilation, and the work per
token.

This module knows vocabularies and tokens; nothing of models, requests or HTTP.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from hopon.core.types import FinishReason, Guide, GuideKind
from hopon.model.vocabulary import Vocabulary, spell

MAX_GUIDE_CHARS = 1 << 17
"""Longest text of a guide."""

MAX_COMPILE_TIME = 0.25
"""Seconds of CPU time that checking a guide may take; an ordinary one takes a millisecond."""

_MAX_REMAINDERS = 30_000  # llguidance has no limit of its own on what multipleOf costs
_CACHED_GUIDES = 32
_DEAD_END = "no token of this model goes on from here"
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=5_000,
    max_lexer_states=50_000,
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_OPTIONS = '%llguidance {"no_forcing": true}'
# A model may otherwise fill its whole output with blanks.
_BLANKS = "[ \\t\\n\\r]{0,40}"
_SCHEMA_OPTIONS = frozenset(
    ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator", "coerce_one_of")
)


class GuideError(ValueError):
    """A guide that cannot be followed; the message says why."""


class Guides:
    """Compiles the guides of one vocabulary. May be used by one thread at a time.

    Args:
        read: reads the vocabulary; called when the first guide comes.
        vocab_size: logits per position of the model: ids beyond the vocabulary are never allowed.
    """

    def __init__(self, read: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._read = read
        self._vocab_size = vocab_size
        self._template = lru_cache(_CACHED_GUIDES)(self._compile)

    def check(self, guide: Guide) -> None:
        """Raises GuideError unless the guide can be followed from its beginning on, within the limits."""
        self._tokenizer  # noqa: B018 - its making is not the guide's
        start = time.thread_time()
        follower = self.follow(guide)
        if follower.finish is FinishReason.REFUSED:
            raise GuideError(follower.message)
        if (spent := time.thread_time() - start) > MAX_COMPILE_TIME:
            raise GuideError(
                f"the {_name(guide)} is too complex: it takes {spent * 1000:.0f} ms to compile, "
                f"at most {MAX_COMPILE_TIME * 1000:.0f} are allowed"
            )

    def follow(self, guide: Guide, output: Sequence[int] = (), stops: Sequence[int] = ()) -> Follower:
        """Go along with an output. A guide that cannot be followed makes a follower that has finished as refused.

        Args:
            guide: what the output must keep to.
            output: its tokens so far.
            stops: tokens that end it; allowed wherever the guide may end, beside what the guide allows.
        """
        follower = Follower(self._vocab_size, stops)
        try:
            follower.begin(self._template(guide).deep_copy(), output)
        except GuideError as error:
            follower.refuse(str(error))
        return follower

    def _compile(self, guide: Guide) -> LLMatcher:
        if len(guide.text) > MAX_GUIDE_CHARS:
            raise GuideError(
                f"the {_name(guide)} has {len(guide.text)} characters; at most {MAX_GUIDE_CHARS} are allowed"
            )
        try:
            grammar = LLMatcher.grammar_from_lark(f"{_lark(guide)}\n{_OPTIONS}\n")
        except UnicodeEncodeError as error:
            raise GuideError(f"the {_name(guide)} has half a surrogate pair, which no text has") from error
        except RecursionError as error:
            raise GuideError(f"the {_name(guide)} is nested too deeply") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GuideError(_explain(guide, matcher.get_error()))
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The vocabulary as llguidance knows it, with one token behind its end that stands for every end."""
        try:
            vocabulary = self._read()
        except (OSError, ValueError) as error:
            raise GuideError(f"guides need the model's vocabulary: {error}") from error
        return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, self._vocab_size)))


class Follower:
    """One output and what its guide allows next.

    ``mask`` uint32 [ceil((vocab + 1) / 32)], a bit per token, the lowest first: always at least one of them is set.
    ``finish`` is None while the output goes on; STOP when it can only end here, REFUSED when the guide cannot be
    followed further, with the reason in ``message``.
    """

    def __init__(self, vocab_size: int, stops: Sequence[int]) -> None:
        self.finish: FinishReason | None = None
        self.message = ""
        self.mask = np.zeros(vocab_size // 32 + 1, np.uint32)
        self._end = vocab_size
        self._stops = frozenset(token for token in stops if token < vocab_size)
        self._stop_mask = np.zeros_like(self.mask)
        for token in self._stops:
            self._stop_mask[token // 32] |= np.uint32(1 << token % 32)
        self._may_end = False

    def begin(self, matcher: LLMatcher, output: Sequence[int]) -> None:
        """Take in the output so far."""
        self._matcher = matcher
        self._accept(list(output))

    def take(self, token: int) -> None:
        """The output's next token, one that the mask allowed."""
        if self._may_end and token in self._stops:
            self._end_with(FinishReason.STOP)
        else:
            self._accept([token])

    def refuse(self, message: str) -> None:
        """The guide cannot be followed (further)."""
        self.message = message
        self._end_with(FinishReason.REFUSED)

    def _accept(self, tokens: list[int]) -> None:
        matcher, mask = self._matcher, self.mask
        if tokens:
            matcher.consume_tokens(tokens)
        if matcher.is_stopped() and not matcher.is_error():
            self._end_with(FinishReason.STOP)
            return
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            reason = _first_line(matcher.get_error())
            self.refuse(f"the guide cannot be followed: {_DEAD_END if reason.startswith('NoExtension') else reason}")
            return
        bit = np.uint32(1 << self._end % 32)
        self._may_end = bool(mask[self._end // 32] & bit)
        mask[self._end // 32] &= ~bit
        if not mask.any():
            if self._may_end:
                self._end_with(FinishReason.STOP)
            else:
                self.refuse(f"the guide cannot be followed: {_DEAD_END}")
        elif self._may_end:
            np.bitwise_or(mask, self._stop_mask, out=mask)

    def _end_with(self, reason: FinishReason) -> None:
        self.finish = reason
        self.mask[:] = 0xFFFFFFFF


class _Tokens:
    """What llguidance asks of a tokenizer. It encodes nothing, because no token is ever forced."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        tokens = spell(vocabulary)[:vocab_size]
        self.tokens = [*tokens, *[b""] * (vocab_size - len(tokens)), b""]
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted(token for token in vocabulary.special if token < vocab_size)

    def __call__(self, text: bytes) -> list[int]:
        return []


def _lark(guide: Guide) -> str:
    """A guide's text as a grammar. Raises GuideError where the text is not what its kind says."""
    match guide.kind:
        case GuideKind.JSON_SCHEMA:
            return f"start: %json {json.dumps(_schema(guide.text))}"
        case GuideKind.JSON_OBJECT:
            return f"start: %json {json.dumps(_schema(guide.text or '{}') | {'type': 'object'})}"
        case GuideKind.REGEX:
            return f"start: /{regex_to_lark(guide.text, 'd')}/" if guide.text else 'start: ""'
        case GuideKind.CHOICE:
            choices = _parsed(guide)
            if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
                raise GuideError("a choice must be a JSON array of at least one string")
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        case GuideKind.GRAMMAR:
            if "%llguidance" in guide.text:
                raise GuideError("the grammar must not have an %llguidance line")
            try:
                return any_to_lark(guide.text).replace("%llguidance {}", "")
            except Exception as error:  # the converter raises what it happens upon
                raise GuideError(f"the grammar is not valid: {error}") from error


def bounded_schema(text: str) -> str:
    """A JSON schema for ``%json`` in a grammar, with bounded blanks.

    Raises:
        GuideError: it is no JSON schema.
    """
    try:
        return json.dumps(_schema(text))
    except RecursionError as error:
        raise GuideError("the JSON schema is nested too deeply") from error


def _schema(text: str) -> dict[str, Any]:
    """A JSON schema with the options that this module sets for llguidance."""
    schema = _parsed(Guide(GuideKind.JSON_SCHEMA, text))
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GuideError("a JSON schema must be an object")
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or options.keys() - _SCHEMA_OPTIONS:
        raise GuideError(f"x-guidance may have {', '.join(sorted(_SCHEMA_OPTIONS))} only, got {str(options)[:80]}")
    if (product := _remainders(schema)) > _MAX_REMAINDERS:
        raise GuideError(
            f"the JSON schema is too complex: the digits of all multipleOf multiply to {product:.3g}, "
            f"at most {_MAX_REMAINDERS} are allowed"
        )
    blanks = {} if "whitespace_flexible" in options else {"whitespace_pattern": _BLANKS}
    return schema | {"x-guidance": blanks | options}


def _remainders(value: Any) -> float:
    """Product of all ``multipleOf`` of a schema without their decimal points: how many remainders there are to tell."""
    if isinstance(value, list):
        return prod(map(_remainders, value))
    if not isinstance(value, dict):
        return 1
    step = value.get("multipleOf")
    digits = re.sub(r"e.*|\D", "", repr(step)).strip("0") if isinstance(step, int | float) else ""
    return float(digits or 1) * prod(map(_remainders, value.values()))


def _parsed(guide: Guide) -> Any:
    try:
        return json.loads(guide.text)
    except (ValueError, RecursionError) as error:
        raise GuideError(f"the {_name(guide)} is not valid JSON: {error}") from error


def _name(guide: Guide) -> str:
    return {
        GuideKind.JSON_SCHEMA: "JSON schema",
        GuideKind.JSON_OBJECT: "JSON object",
        GuideKind.REGEX: "regular expression",
        GuideKind.GRAMMAR: "grammar",
        GuideKind.CHOICE: "choice",
    }[guide.kind]


def _explain(guide: Guide, problem: str) -> str:
    """What llguidance says of a guide, in a sentence."""
    if problem.startswith("panic"):
        return f"the {_name(guide)} is too complex"
    if keys := re.search(r"Unimplemented keys: \[(.*?)\]", problem):
        return f"the {_name(guide)} uses keys that are not supported: {keys[1]}"
    reason = re.search(r"regex parse error:.*^error: ([^\n]*)$", problem, re.MULTILINE | re.DOTALL)
    said = f"a regular expression: {reason[1]}" if reason else _first_line(problem)
    return f"the {_name(guide)} is not valid or not supported: {said}"


def _first_line(problem: str) -> str:
    line = problem.strip().partition("\n")[0]
    line = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)
    return line if len(line) <= 300 else line[:297] + "..."
