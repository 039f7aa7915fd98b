"""Incremental text: deltas are the text, whole characters only, and stop strings are found wherever tokens end."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from hopon.serve.stream import StopMatcher, TextStream, WindowDetokenizer
from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import DATA
from tests.serve.test_tokenizer import SPELLABLE

STORIES = DATA.parents[1] / "data" / "stories260k"


@cache
def stories() -> Tokenizer:
    return Tokenizer.load(STORIES)


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary that only the library's own decoder understands."""
    folder: Path = tmp_path_factory.mktemp("wordpiece")
    words = ["[UNK]", "the", "un", "##able", "##s", "cat", ",", "##fort"]
    library = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def run(stream: TextStream, ids: list[int], sizes: list[int]) -> list[str]:
    """Texts of pushing ids in groups of these sizes (the rest one by one), and of the end."""
    texts = []
    start = 0
    for size in [*sizes, *[1] * len(ids)]:
        if start >= len(ids):
            break
        piece = stream.push(ids[start : start + size])
        assert piece.num_tokens == len(ids[start : start + size])
        texts.append(piece.text)
        start += size
    return [*texts, stream.finish()]


SIZES = st.lists(st.integers(1, 5), max_size=10)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), SIZES, st.booleans(), st.booleans())
def test_deltas_are_the_text(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool, track: bool) -> None:
    """For random ids in any grouping the deltas together are the decoded sequence, control tokens shown or not."""
    stream = TextStream(tokenizer, skip_special_tokens=skip, offsets=track)
    assert "".join(run(stream, ids, sizes)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(SPELLABLE, SIZES)
def test_no_delta_has_a_broken_character(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    """Of well-formed text no delta shows a replacement character, whatever tokens cut through."""
    ids = tokenizer.encode(text, parse_special=False)
    texts = run(TextStream(tokenizer), ids, sizes)
    assert "".join(texts) == text
    assert all("\ufffd" not in piece for piece in texts) or "\ufffd" in text


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=30), SIZES)
def test_v063_sentencepiece_keeps_its_spaces(ids: list[int], sizes: list[int]) -> None:
    """Random ids of a SentencePiece vocabulary: the deltas together are the text, as a beginning or behind one."""
    tokenizer = stories()
    whole = tokenizer.decode(ids)
    assert "".join(run(TextStream(tokenizer, continuation=False), ids, sizes)) == whole
    behind = "".join(run(TextStream(tokenizer, continuation=True), ids, sizes))
    prefix = tokenizer.encode("Once", add_special_tokens=False)
    assert tokenizer.decode(prefix) + behind == tokenizer.decode([*prefix, *ids])


def test_v062_lone_bytes_do_not_stall(tokenizer: Tokenizer) -> None:
    """200 tokens that are no text: each is shown at once, none is held back."""
    [lone] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80"]
    stream = TextStream(tokenizer)
    assert [stream.push([lone]).text for _ in range(200)] == ["\ufffd"] * 200
    [lead] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0"]
    stream = TextStream(tokenizer)
    assert "".join(stream.push([lead]).text for _ in range(200)) == "\ufffd" * 199
    assert stream.finish() == "\ufffd"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=20), SIZES)
def test_other_decoders_stream_too(wordpiece: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    """A decoder that joins words by rules of its own: the deltas together are the text."""
    assert not wordpiece.is_bytewise
    assert "".join(run(TextStream(wordpiece), ids, sizes)) == wordpiece.decode(ids)


def test_windows_are_bounded(tokenizer: Tokenizer) -> None:
    """The window decoder too gives up on a character after a few tokens, and its window does not grow."""
    [lone] = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80"]
    detokenizer = WindowDetokenizer(tokenizer)
    text = "".join(detokenizer.push([lone]) for _ in range(100))
    assert len(text) >= 100 - WindowDetokenizer.MAX_HELD
    assert len(text + detokenizer.finish()) == 100


def naive_stop(text: str, stops: list[str]) -> tuple[int, str | None]:
    """Where the text ends when characters arrive one by one: at the first complete stop, the longest of them."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return len(text), None


LETTERS = st.text(st.sampled_from("abc"), max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, max_size=10), st.lists(LETTERS.filter(bool), min_size=1, max_size=3), st.booleans())
def test_stop_strings_do_not_depend_on_token_borders(pieces: list[str], stops: list[str], include: bool) -> None:
    """The text is cut where a reader of single characters would cut it."""
    matcher = StopMatcher(stops, include=include)
    shown, found = "", None
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            break
    if found is None:
        shown += matcher.finish()
    cut, stop = naive_stop("".join(pieces), stops)
    assert found == stop
    assert shown == "".join(pieces)[:cut] + (stop if include and stop else "")


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, max_size=10), st.lists(LETTERS.filter(bool), min_size=1, max_size=3))
def test_v056_only_beginnings_of_stop_strings_are_held_back(pieces: list[str], stops: list[str]) -> None:
    """After every piece, what is held back is the beginning of a stop string, and nothing longer would be."""
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        if found is not None:
            return
        seen += piece
        shown += text
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(
            stop.startswith(tail) for stop in stops for n in range(len(held) + 1, 4) if len(tail := seen[-n:]) == n
        )


def test_a_stop_that_never_comes_delays_nothing(tokenizer: Tokenizer) -> None:
    """V056: a long stop string that has nothing in common with the text holds back nothing."""
    ids = tokenizer.encode("The capital of France is Paris, of course.")
    stream = TextStream(tokenizer, stop=["#" * 40])
    assert [stream.push([i]).text for i in ids] == [tokenizer.token_text(i) for i in ids]


def test_the_output_ends_at_the_token_that_completes_the_stop(tokenizer: Tokenizer) -> None:
    """Tokens behind it, arrived together with it, are discarded and not counted."""
    ids = tokenizer.encode("one two three four")
    piece = TextStream(tokenizer, stop=["wo th"], offsets=True).push(ids)
    assert (piece.text, piece.num_tokens, piece.stop) == ("one t", 3, "wo th")
    assert piece.offsets == (0, 3, 7)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    """Before min_tokens no stop string ends the text."""
    ids = tokenizer.encode("no no no no")
    stream = TextStream(tokenizer, stop=["no"], min_tokens=3)
    piece = stream.push(ids)
    assert (piece.text, piece.num_tokens) == ("no no ", 3)
