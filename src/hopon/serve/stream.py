"""From new tokens to new text, for one output: incremental decoding and stop strings.

It knows tokens and text; nothing of requests, HTTP or engines. Three promises: what was given out never changes; the
pieces together are the text of all tokens, cut at the stop string; nothing is held back longer than it must be.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hopon.serve.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """Text of a growing sequence."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete; never part of a character."""

    def finish(self) -> str:
        """What was held back; no tokens may follow."""


class ByteDetokenizer:
    """For vocabularies whose texts are concatenated bytes.

    Holds back at most three bytes: a well-formed beginning of one character. Ill-formed bytes come out as replacement
    characters at once, so a stream of lone bytes neither stalls nor grows.

    Args:
        tokenizer: must be bytewise.
        skip_special_tokens: control tokens have no text.
        continuation: the text goes on behind a prompt, so a first space stays; else the space that SentencePiece puts
            in front of a text is taken away, as :meth:`Tokenizer.decode` does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continuation: bool = True) -> None:
        assert tokenizer.is_bytewise, "this vocabulary does not spell texts byte by byte"
        self._spelling = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = tokenizer.vocabulary.strips_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`Detokenizer`."""
        spelling, hidden = self._spelling, self._hidden
        return self._first(self._decoder.decode(b"".join([spelling(i) for i in tokens if i not in hidden])))

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._first(self._decoder.decode(b"", True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For all other vocabularies: decodes the last few tokens together with those before them, and shows the rest.

    A window ends where its text does not end in a replacement character, or after ``MAX_HELD`` tokens. (The library's
    own stream decoder raises on some sequences and never gives out its tail.)
    """

    MAX_HELD = 8

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0  # tokens at the head of the window whose text is out; they are context

    def push(self, tokens: Sequence[int]) -> str:
        """See :class:`Detokenizer`."""
        texts = []
        for token in tokens:
            self._window.append(token)
            text = self._new_text()
            num_held = len(self._window) - self._num_shown
            if text and (not text.endswith("\ufffd") or num_held >= self.MAX_HELD):
                texts.append(text)
                del self._window[: self._num_shown]
                self._num_shown = num_held
        return "".join(texts)

    def finish(self) -> str:
        """See :class:`Detokenizer`."""
        return self._new_text()

    def _new_text(self) -> str:
        whole = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        shown = self._tokenizer.decode(self._window[: self._num_shown], skip_special_tokens=self._skip)
        return whole[len(shown) :]


class StopMatcher:
    """Finds the first stop string in a growing text.

    The match that is complete first counts, as if the text came character by character; of two that are complete at
    the same character, the longer one. So the outcome does not depend on where tokens end. Text is held back only
    while it is the beginning of a stop string.

    Args:
        stops: non-empty strings.
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "a stop string must not be empty"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certain by now, and the stop string if it was found; then nothing may follow."""
        text = self._held + text
        found = [(i + len(stop), i, stop) for stop in self._stops if (i := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include else start], stop
        num_held = self._num_held(text)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """News of a text.

    Args:
        text: what to show.
        num_tokens: how many of the pushed tokens belong to the output; the others came behind a stop string.
        stop: the stop string that ended it, if one did.
        offsets: for each of those tokens, the number of characters before it (only when asked for).
    """

    text: str
    num_tokens: int
    stop: str | None = None
    offsets: tuple[int, ...] = ()


class TextStream:
    """The text of one output.

    Args:
        tokenizer: of the model.
        stop: stop strings. The output ends with the token that completes one; the text ends before it.
        include_stop: keep the stop string in the text.
        min_tokens: tokens before this count complete no stop string.
        skip_special_tokens: control tokens have no text.
        offsets: report where each token begins in the text.
        continuation: see :class:`ByteDetokenizer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        offsets: bool = False,
        continuation: bool = True,
    ) -> None:
        self._detokenizer: Detokenizer
        if tokenizer.is_bytewise:
            self._detokenizer = ByteDetokenizer(
                tokenizer, skip_special_tokens=skip_special_tokens, continuation=continuation
            )
        else:
            self._detokenizer = WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include=include_stop) if stop else None
        self._min_tokens = min_tokens
        self._with_offsets = offsets
        self._num_tokens = 0
        self._num_chars = 0

    @property
    def num_chars(self) -> int:
        """Characters decoded so far, those held back included; counted only when offsets were asked for."""
        return self._num_chars

    def push(self, tokens: Sequence[int]) -> Piece:
        """Take in new tokens. After a piece with a ``stop`` no more may follow."""
        if self._matcher is None and not self._with_offsets:
            self._num_tokens += len(tokens)
            return Piece(self._detokenizer.push(tokens), len(tokens))
        texts: list[str] = []
        offsets: list[int] = []
        stop = None
        for token in tokens:
            offsets.append(self._num_chars)
            text = self._detokenizer.push((token,))
            self._num_chars += len(text)
            self._num_tokens += 1
            if self._matcher is not None and self._num_tokens >= self._min_tokens:
                text, stop = self._matcher.push(text)
            texts.append(text)
            if stop is not None:
                break
        return Piece("".join(texts), len(offsets), stop, tuple(offsets) if self._with_offsets else ())

    def finish(self) -> str:
        """What was held back, when the output ends otherwise than by a stop string."""
        tail = self._detokenizer.finish()
        return self._matcher.finish() + tail if self._matcher is not None else tail
