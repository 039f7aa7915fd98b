"""Sampling parameters as the rows that the kernel reads, and what it found as row results.

Which positions want what follows from the plan alone; a random number depends on (seed, choice, output index) alone.
What penalties and bad words look at is rebuilt from prompt and output whenever a row is opened, so a resumed or
replayed sequence samples what it would have sampled; guides are followed anew in the same way. This module knows
tokens and log-probabilities, not models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Chunk, OpenRow, RowResult
from hopon.core.types import MAX_LOGPROBS, Logprob
from hopon.model.batch import Rows, view
from hopon.model.guide import Guides

_ROW = np.dtype(native.SampleRow)
_INTS = _ROW.itemsize // 4
_INDEX, _NUM_BANNED = native.SampleRow.index.offset // 4, native.SampleRow.num_banned.offset // 4
_TINY, _HUGE = 1e-30, 1e30  # what is beyond is the same, but no float32


class Counts:
    """The distinct tokens of a sequence, and how often its output has each of them.

    ``tokens`` and ``counts`` int32 [capacity], of which the first ``num_tokens`` mean something; both grow, so their
    addresses change.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.tokens = np.array([*dict.fromkeys(prompt)], np.int32)
        self.counts = np.zeros(len(self.tokens), np.int32)
        self.num_tokens = len(self.tokens)
        self._places = {token: place for place, token in enumerate(self.tokens.tolist())}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token of output."""
        place = self._places.setdefault(token, self.num_tokens)
        if place == self.num_tokens:
            if place == len(self.tokens):
                room = np.zeros(place + 64, np.int32)
                self.tokens, self.counts = np.concatenate((self.tokens, room)), np.concatenate((self.counts, room))
            self.tokens[place] = token
            self.num_tokens += 1
        self.counts[place] += 1


class _Row:
    """What is known of an open row beside its template; keeps the arrays alive that the template points to."""

    def __init__(self, opened: OpenRow, vocab_size: int, guides: Guides) -> None:
        params = opened.params
        self.opened = opened
        # Files may declare end tokens that their model does not have.
        self.stops = np.array([token for token in opened.stop_token_ids if token < vocab_size], np.int32)
        self.banned = self.stops
        self.biased = np.array([token for token, _ in params.logit_bias], np.int32)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.mask: NDArray[np.uint32] | None = None
        self.guided = guides.follow(params.guide, opened.output, opened.stop_token_ids) if params.guide else None
        self.counts: Counts | None = None
        if params.repetition_penalty != 1:
            self.counts = Counts(opened.prompt, opened.output)
        elif params.presence_penalty or params.frequency_penalty:
            self.counts = Counts((), opened.output)

    def ban(self, output: Sequence[int]) -> NDArray[np.int32]:
        """Tokens that would end the output too early, or complete one of the bad words."""
        params, end = self.opened.params, len(output)
        stops = self.stops.tolist() if end < params.min_tokens else []
        words = [
            word[-1]
            for word in params.bad_words
            if len(word) <= end + 1 and tuple(output[end - len(word) + 1 :]) == word[:-1]
        ]
        self.banned = np.array(stops + words, np.int32)
        return self.banned


class Sampler:
    """Keeps a row of sampling parameters per row of the batch, and turns chunks into what is sampled and back.

    All arrays are allocated once. Behind the rows' own parameters lie those of positions that are scored.

    Args:
        rows: the histories.
        max_num_seqs: rows.
        max_num_logits: most positions of a step that want logits.
        logits: [n, vocabulary] float32; position i of a step finds its logits in row i % n.
        guides: of the model's vocabulary.
    """

    def __init__(
        self, rows: Rows, *, max_num_seqs: int, max_num_logits: int, logits: NDArray[np.float32], guides: Guides
    ) -> None:
        self._rows = rows
        self._guides = guides
        self._vocab_size = logits.shape[1]
        self._templates = np.zeros(max_num_seqs + max_num_logits, _ROW)
        self._first_scored = max_num_seqs
        self._numbers = view(self._templates.view(np.int32))
        self._open: list[_Row | None] = [None] * max_num_seqs
        self._which = np.zeros(max_num_logits, np.int32)
        self._wanted = np.zeros(max_num_logits, np.uint8)
        self._tokens = np.zeros(max_num_logits, np.int32)
        self._logprobs = np.zeros(max_num_logits, np.float32)
        self._top_ids = np.zeros((max_num_logits, MAX_LOGPROBS), np.int32)
        self._top_logprobs = np.zeros((max_num_logits, MAX_LOGPROBS), np.float32)
        self._views = view(self._which), view(self._wanted), view(self._tokens)
        self._slices = [  # what the kernel reads of a step's positions, as many at a time as there are rows of logits
            native.Sampling(
                logits=logits.ctypes.data,
                stride=logits.strides[0] // 4,
                vocab=self._vocab_size,
                max_top=MAX_LOGPROBS,
                rows=self._templates.ctypes.data,
                which=self._which[start:].ctypes.data,
                want_logprob=self._wanted[start:].ctypes.data,
                out_token=self._tokens[start:].ctypes.data,
                out_logprob=self._logprobs[start:].ctypes.data,
                out_top_ids=self._top_ids[start:].ctypes.data,
                out_top_logprobs=self._top_logprobs[start:].ctypes.data,
            )
            for start in range(0, max_num_logits, len(logits))
        ]
        self._slice_size = len(logits)

    def open(self, opened: OpenRow) -> None:
        """A sequence takes a row."""
        params = opened.params
        row = self._open[opened.row] = _Row(opened, self._vocab_size, self._guides)
        template = self._templates[opened.row]
        template["logits_row"], template["forced"] = 0, -1
        template["temperature"], template["min_p"] = min(params.temperature, _HUGE), params.min_p
        template["top_p"], template["top_k"] = max(params.top_p, _TINY), min(max(params.top_k, 0), self._vocab_size)
        template["seed"], template["choice"], template["index"] = opened.seed, opened.choice, 0
        template["num_top"] = params.logprobs or 0
        template["num_banned"], template["banned"] = len(row.stops), row.stops.ctypes.data
        template["num_biased"], template["biased"] = len(row.biased), row.biased.ctypes.data
        template["biases"] = row.biases.ctypes.data
        template["repetition"] = min(max(params.repetition_penalty, _TINY), _HUGE)
        template["frequency"], template["presence"] = params.frequency_penalty, params.presence_penalty
        template["num_seen"] = 0
        self._point_to_counts(opened.row)
        if row.guided is not None:
            self.mask(opened.row, row.guided.mask)
        elif params.allowed_token_ids:
            self.mask(opened.row, mask_of(params.allowed_token_ids, self._vocab_size))
        else:
            self.mask(opened.row, None)

    def mask(self, row: int, allowed: NDArray[np.uint32] | None) -> None:
        """From now on a row samples only tokens whose bit is set.

        Args:
            row: an open row.
            allowed: [ceil(vocab / 32)] bits, the lowest first, at least one of them set; None: all tokens. Kept until
                the next call, and may be written to between two steps.
        """
        self._at(row).mask = allowed
        self._templates[row]["mask"] = native.pointer(allowed, np.uint32) or 0

    def close(self, row: int) -> None:
        """The row's sequence is gone."""
        self._open[row] = None

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Write down what is sampled at the positions that want logits, in the batch's order."""
        rows, numbers = self._rows, self._numbers
        which, wanted, _ = self._views
        at = 0
        for chunk in chunks:
            number = chunk.row
            row = self._at(number)
            scored = chunk.num_logits - chunk.sample
            if scored:
                self._score(chunk, row.opened.params.prompt_logprobs or 0, at, scored)
                at += scored
            if chunk.sample:
                assert scored >= 0, f"row {number} samples without logits"
                params = row.opened.params
                index = rows.length(number) - len(row.opened.prompt)
                numbers[number * _INTS + _INDEX] = index
                if params.bad_words:
                    template, banned = self._templates[number], row.ban(rows.tail(number, index))
                    template["num_banned"], template["banned"] = len(banned), banned.ctypes.data
                elif index >= params.min_tokens:
                    numbers[number * _INTS + _NUM_BANNED] = 0
                which[at], wanted[at] = number, params.logprobs is not None
                at += 1

    def _score(self, chunk: Chunk, num_top: int, at: int, count: int) -> None:
        """Known tokens behind a chunk's first ``count`` wanted positions, which begin at the step's ``at``-th."""
        first = chunk.start + chunk.count - chunk.num_logits  # position of the first wanted logits
        assert first + count < self._rows.length(chunk.row), f"row {chunk.row} scores an unknown token"
        begin = self._first_scored + at
        part = self._templates[begin : begin + count]
        part[:] = self._templates[chunk.row]
        part["forced"] = self._rows.tokens[chunk.row, first + 1 : first + 1 + count]
        part["num_top"] = num_top
        self._which[at : at + count] = np.arange(begin, begin + count)
        self._wanted[at : at + count] = 1

    def part(self, start: int, stop: int) -> native.Sampling:
        """The step's prepared positions ``start:stop``; ``start`` is a multiple of the number of logits rows."""
        part = self._slices[start // self._slice_size]
        part.num_rows = stop - start
        return part

    def results(self, chunks: Sequence[Chunk]) -> tuple[RowResult, ...]:
        """One result per chunk from what the kernel found; sampled tokens join the history of their rows."""
        results, at = [], 0
        tokens = self._views[2]
        for chunk in chunks:
            number = chunk.row
            row = self._at(number)
            last = at + chunk.num_logits - chunk.sample
            scores = tuple([self._logprob(i) for i in range(at, last)]) if last > at else ()
            guided = row.guided if chunk.sample else None
            if guided is not None and guided.finish is not None:  # nothing may follow what it was opened with
                results.append(RowResult(number, (), (), scores, guided.finish, guided.message))
            elif chunk.sample:
                token = tokens[last]
                self._rows.append(number, token)
                if row.counts is not None:
                    row.counts.add(token)
                    self._point_to_counts(number)
                own = () if row.opened.params.logprobs is None else (self._logprob(last),)
                result = RowResult(number, (token,), own, scores)
                if guided is not None:
                    guided.take(token)
                    result = replace(result, finish=guided.finish, message=guided.message)
                results.append(result)
            else:
                results.append(RowResult(number, (), (), scores))
            at += chunk.num_logits
        return tuple(results)

    def _logprob(self, at: int) -> Logprob:
        """What the kernel found at a position whose log-probability was wanted."""
        count = int(self._templates[self._which[at]]["num_top"])
        ids, logprobs = self._top_ids[at, :count].tolist(), self._top_logprobs[at, :count].tolist()
        return Logprob(int(self._tokens[at]), float(self._logprobs[at]), tuple(zip(ids, logprobs, strict=True)))

    def _at(self, number: int) -> _Row:
        row = self._open[number]
        assert row is not None, f"row {number} computes while it is not open"
        return row

    def _point_to_counts(self, number: int) -> None:
        counts = self._at(number).counts
        if counts is not None:
            template = self._templates[number]
            template["num_seen"] = counts.num_tokens
            template["seen"], template["counts"] = counts.tokens.ctypes.data, counts.counts.ctypes.data


def mask_of(tokens: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A mask with the bits of these tokens set; see :meth:`Sampler.mask`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
