"""What is asked, and when: drawn from a seed, or read from a trace.

An :class:`Ask` is a request without its token ids: lengths, arrival, and which pieces of its prompt it shares with
others. It carries the true output length, which a scheduler must not see: :meth:`Ask.request` makes the core's request
of it, without that length. Ids are made up; nothing here knows a model or a tokenizer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from math import exp, floor, gcd, isfinite, log, sqrt
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from hopon.core.types import Request, SamplingParams

END_TOKEN = -1
"""The token with which a simulated device ends a request."""

MOONCAKE_BLOCK = 512
"""Prompt tokens that one hash of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` consecutive prompt tokens. Pieces of one id hold the same tokens, from their beginning."""

    token: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request to be.

    Args:
        number: place in the workload; becomes the request's id and seed.
        arrival: seconds from the workload's beginning.
        input_tokens: length of the prompt, at least 1.
        output_tokens: tokens that it will really generate, at least 1.
        max_tokens: limit that its user gives; None for none.
        priority: smaller goes first.
        kind: its class in a mix; empty where there is no mix.
        shared: leading pieces of its prompt that others may have, too; what is left is its own.
    """

    number: int
    arrival: float
    input_tokens: int
    output_tokens: int
    max_tokens: int | None
    priority: int = 0
    kind: str = ""
    shared: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.arrival) and self.arrival >= 0):
            raise ValueError(f"an arrival must be at least 0 seconds, got {self.arrival}")
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 or None, got {self.max_tokens}")
        if sum(piece.count for piece in self.shared) > self.input_tokens:
            raise ValueError(f"the shared pieces {self.shared} are longer than the prompt of {self.input_tokens}")

    def pieces(self) -> list[Piece]:
        """The whole prompt."""
        own = self.input_tokens - sum(piece.count for piece in self.shared)
        return [*self.shared, *([Piece(2 * self.number, own)] if own else [])]

    def prompt(self, vocab_size: int | None = None) -> tuple[int, ...]:
        """Made-up ids. Without a vocabulary a piece is one id again and again; with one, ids below its size."""
        ids: list[int] = []
        for piece in self.pieces():
            if vocab_size is None:
                ids += [piece.token] * piece.count
            else:
                ids += Random(piece.token).choices(range(vocab_size), k=piece.count)
        return tuple(ids)

    def request(self) -> Request:
        """The core's request. It ends at ``max_tokens`` or with an END_TOKEN that only the device knows of."""
        return Request(
            request_id=str(self.number),
            prompt=self.prompt(),
            params=SamplingParams(temperature=0.0, max_tokens=self.max_tokens),
            seed=self.number,
            arrival=self.arrival,
            priority=self.priority,
            stop_token_ids=(END_TOKEN,),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Asks in order of arrival, and what was done to them."""

    name: str
    asks: tuple[Ask, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.asks:
            raise ValueError(f"workload {self.name}: no requests in it")
        for before, after in zip(self.asks, self.asks[1:], strict=False):
            if after.arrival < before.arrival:
                raise ValueError(f"workload {self.name}: {after.arrival} s follows {before.arrival} s")

    def __iter__(self) -> Iterator[Ask]:
        return iter(self.asks)

    def __len__(self) -> int:
        return len(self.asks)

    @property
    def output_lengths(self) -> list[int]:
        """True output lengths, for a simulated device and for nobody else."""
        return [ask.output_tokens for ask in self.asks]

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output, as its user limits it."""
        return max(ask.input_tokens + max(ask.output_tokens, ask.max_tokens or 0) for ask in self.asks)

    def first(self, count: int) -> Workload:
        """The first ``count`` requests."""
        if count < 1:
            raise ValueError(f"a workload needs at least 1 request, got {count}")
        note = (f"the first {count} of {len(self.asks)} requests",) if count < len(self.asks) else ()
        return replace(self, asks=self.asks[:count], notes=self.notes + note)

    def busiest(self, count: int) -> Workload:
        """The ``count`` requests in a row that arrive in the shortest time, from 0 on."""
        if count < 1:
            raise ValueError(f"a workload needs at least 1 request, got {count}")
        if count >= len(self.asks):
            return self
        times = [ask.arrival for ask in self.asks]
        first = min(range(len(times) - count + 1), key=lambda i: times[i + count - 1] - times[i])
        asks = tuple(
            replace(ask, number=number, arrival=ask.arrival - times[first])
            for number, ask in enumerate(self.asks[first : first + count])
        )
        note = f"the busiest {count} of {len(self.asks)} requests in a row, from second {times[first]:.0f} on"
        return replace(self, asks=asks, notes=(*self.notes, note))

    def scaled(self, rate: float = 1.0, length: float = 1.0) -> Workload:
        """Arrivals ``rate`` times as fast, prompts and outputs ``length`` times as long (rounded, at least 1 token)."""
        for name, factor in (("rate", rate), ("length", length)):
            if not (isfinite(factor) and factor > 0):
                raise ValueError(f"the {name} scale must be above 0, got {factor}")
        notes = []
        if rate != 1:
            notes.append(f"arrivals {rate:g} times as fast")
        if length != 1:
            notes.append(f"lengths scaled by {length:g}")
        asks = tuple(_scaled(ask, rate, length) for ask in self.asks)
        return replace(self, asks=asks, notes=self.notes + tuple(notes))

    def limited(self, max_tokens: int | None) -> Workload:
        """Every user gives this limit, whatever the output will be; a longer output is cut there."""
        cut = 0 if max_tokens is None else sum(ask.output_tokens > max_tokens for ask in self.asks)
        note = f"max_tokens {max_tokens} given by every user" + (f", which cuts {cut} outputs" if cut else "")
        asks = tuple(replace(ask, max_tokens=max_tokens) for ask in self.asks)
        return replace(self, asks=asks, notes=(*self.notes, note))


def _scaled(ask: Ask, rate: float, length: float) -> Ask:
    def scale(count: int) -> int:
        return max(1, round(count * length))

    shared = []
    passed = used = 0
    for piece in ask.shared:  # borders are scaled, so that equal beginnings stay equal
        passed += piece.count
        border = min(round(passed * length), scale(ask.input_tokens))
        if border > used:
            shared.append(Piece(piece.token, border - used))
        used = border
    return replace(
        ask,
        arrival=ask.arrival / rate,
        input_tokens=scale(ask.input_tokens),
        output_tokens=scale(ask.output_tokens),
        max_tokens=None if ask.max_tokens is None else scale(ask.max_tokens),
        shared=tuple(shared),
    )


# ---- drawn ----


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, random: Random) -> int:
        """At least 1."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from ``low`` to ``high``."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must be 1 <= low <= high, got {self.low}-{self.high}")

    def draw(self, random: Random) -> int:
        """One of them."""
        return random.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with a mean, drawn again above a cap (as in Anyscale's comparison of June 2023), rounded."""

    mean: float
    cap: int

    def __post_init__(self) -> None:
        if not self.mean > 0 or self.cap < 1:
            raise ValueError(f"an exponential needs a mean above 0 and a cap of at least 1, got {self.mean}:{self.cap}")

    def draw(self, random: Random) -> int:
        """Redrawn until it is below the cap."""
        while (value := round(random.expovariate(1 / self.mean))) > self.cap:
            pass
        return max(1, value)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal with a mean and a coefficient of variation, clipped to [1, cap]."""

    mean: float
    variation: float
    cap: int

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.variation >= 0) or self.cap < 1:
            raise ValueError(
                f"a lognormal needs a mean above 0, a variation of at least 0 and a cap of at least 1, "
                f"got {self.mean}:{self.variation}:{self.cap}"
            )

    def draw(self, random: Random) -> int:
        """Rounded."""
        sigma = sqrt(log(1 + self.variation**2))
        value = exp(random.gauss(log(self.mean) - sigma**2 / 2, sigma))
        return min(self.cap, max(1, round(value)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Values at equally spaced probabilities from 0 to 1, straight lines between them: a measured distribution."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2 or self.values[0] < 1 or list(self.values) != sorted(self.values):
            raise ValueError(f"quantiles must be at least two rising values of at least 1, got {self.values}")

    def draw(self, random: Random) -> int:
        """By inversion."""
        place = random.random() * (len(self.values) - 1)
        low = int(place)
        return round(self.values[low] + (place - low) * (self.values[low + 1] - self.values[low]))


def parse_lengths(text: str) -> Lengths:
    """``512``, ``32-512``, ``exp:MEAN:CAP`` or ``lognormal:MEAN:VARIATION:CAP``.

    Raises:
        ValueError: names the text and the forms.
    """
    try:
        match text.split(":"):
            case ["exp", mean, cap]:
                return Exponential(float(mean), int(cap))
            case ["lognormal", mean, variation, cap]:
                return Lognormal(float(mean), float(variation), int(cap))
            case [plain]:
                low, dash, high = plain.partition("-")
                return Uniform(int(low), int(high if dash else low))
            case _:
                raise ValueError("no such form")
    except ValueError as error:
        forms = "512, 32-512, exp:MEAN:CAP or lognormal:MEAN:VARIATION:CAP"
        raise ValueError(f"lengths {text!r}: {error}; known forms: {forms}") from error


Arrivals = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """``groups`` beginnings of ``tokens`` tokens; each request takes one of them, at random, in front of its own."""

    groups: int
    tokens: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.tokens < 1:
            raise ValueError(
                f"sharing needs at least 1 group and 1 token, got {self.groups} groups of {self.tokens} tokens"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A class of a mix: its name, its share of the requests (a weight), lengths of its prompts and outputs."""

    name: str = ""
    weight: float = 1.0
    inputs: Lengths
    outputs: Lengths

    def __post_init__(self) -> None:
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"the weight of class {self.name!r} must be above 0, got {self.weight}")


def arrival_times(
    *,
    rate: float,
    count: int,
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    seed: int = 0,
) -> list[float]:
    """Seconds at which requests are sent, the first at 0. Gaps are never clipped or rescaled.

    Args:
        rate: requests per second; 0 sends all of them at once.
        count: how many.
        arrivals: gaps that are constant, exponential or gamma distributed.
        variation: coefficient of variation of gamma gaps.
        end_rate: the rate rises (or falls) on a straight line to this one, over the time that ``count`` requests take
            at the mean of both.
        seed: same seed, same times.

    Raises:
        ValueError: names the value and the limit.
    """
    if count < 1:
        raise ValueError(f"a workload needs at least 1 request, got {count}")
    if not (isfinite(rate) and rate >= 0):
        raise ValueError(f"the rate must be at least 0 requests per second, got {rate}")
    if arrivals == "gamma" and not variation > 0:
        raise ValueError(f"the variation of gamma gaps must be above 0, got {variation}")
    unit: dict[str, Callable[[Random], float]] = {
        "constant": lambda random: 1.0,
        "poisson": lambda random: random.expovariate(1.0),
        "gamma": lambda random: random.gammavariate(1 / variation**2, variation**2),
    }
    if arrivals not in unit:
        raise ValueError(f"arrivals must be one of {', '.join(unit)}, got {arrivals!r}")
    random = Random(f"{seed} arrival")
    if rate == 0:
        return [0.0] * count
    gaps = [0.0] + [unit[arrivals](random) for _ in range(count - 1)]
    if end_rate is None:
        return list(accumulate(gap / rate for gap in gaps))
    if not (isfinite(end_rate) and end_rate > 0):
        raise ValueError(f"the last rate of a ramp must be above 0 requests per second, got {end_rate}")
    slope = (end_rate - rate) * (rate + end_rate) / (2 * count)
    return [_moment(passed, rate, slope, end_rate) for passed in accumulate(gaps)]


def _moment(passed: float, rate: float, slope: float, end_rate: float) -> float:
    """When ``passed`` requests are due at a rate that moves from ``rate`` to ``end_rate`` and stays there."""
    if slope == 0:
        return passed / rate
    span = (end_rate - rate) / slope
    if passed > span * (rate + end_rate) / 2:
        return span + (passed - span * (rate + end_rate) / 2) / end_rate
    return 2 * passed / (rate + sqrt(rate * rate + 2 * slope * passed))


def draw(
    *,
    count: int,
    rate: float,
    inputs: Lengths,
    outputs: Lengths,
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
) -> Workload:
    """A workload from a seed.

    Args:
        count: requests.
        rate: requests per second; 0 sends all of them at once.
        inputs: lengths of prompts, without a shared beginning.
        outputs: lengths of outputs; ``max_tokens`` is the same.
        arrivals: see :func:`arrival_times`; so are the next two.
        variation: of gamma gaps.
        end_rate: of a ramp.
        sharing: shared beginnings of prompts.
        seed: same seed, same workload.

    Raises:
        ValueError: names the value and the limit.
    """
    return draw_mix(
        count=count,
        rate=rate,
        kinds=(Kind(inputs=inputs, outputs=outputs),),
        arrivals=arrivals,
        variation=variation,
        end_rate=end_rate,
        sharing=sharing,
        seed=seed,
    )


def draw_mix(
    *,
    count: int,
    rate: float,
    kinds: Sequence[Kind],
    arrivals: Arrivals = "poisson",
    variation: float = 1.0,
    end_rate: float | None = None,
    sharing: Sharing | None = None,
    seed: int = 0,
) -> Workload:
    """Several classes of requests at random in one stream, each as often as its weight says; else as :func:`draw`."""
    times = arrival_times(rate=rate, count=count, arrivals=arrivals, variation=variation, end_rate=end_rate, seed=seed)
    # A stream of its own for each: a longer prompt moves no arrival.
    prompts, lengths, groups, classes = (Random(f"{seed} {what}") for what in ("input", "output", "group", "kind"))
    weights = [kind.weight for kind in kinds]
    asks = []
    for number, now in enumerate(times):
        [kind] = classes.choices(kinds, weights)
        own = kind.inputs.draw(prompts)
        shared = (Piece(2 * groups.randrange(sharing.groups) + 1, sharing.tokens),) if sharing else ()
        output = kind.outputs.draw(lengths)
        asks.append(
            Ask(
                number=number,
                arrival=now,
                input_tokens=own + sum(piece.count for piece in shared),
                output_tokens=output,
                max_tokens=output,
                kind=kind.name,
                shared=shared,
            )
        )
    ramp = "" if end_rate is None else f" to {end_rate:g}"
    return Workload(name=f"{arrivals} arrivals, {rate:g}{ramp} per second, seed {seed}", asks=tuple(asks))


PASS_SECONDS = 1 / 32
"""What a pass takes where every pass takes the same; a power of two, so that sums of passes are exact."""


def mulberry32(seed: int) -> Iterator[float]:
    """Numbers in [0, 1): the generator of that name, 32 bits, by Tommy Ettinger (public domain)."""
    state = seed & 0xFFFFFFFF
    while True:
        state = (state + 0x6D2B79F5) & 0xFFFFFFFF
        mixed = ((state ^ (state >> 15)) * (state | 1)) & 0xFFFFFFFF
        mixed ^= (mixed + ((mixed ^ (mixed >> 7)) * (mixed | 61) & 0xFFFFFFFF)) & 0xFFFFFFFF
        yield ((mixed ^ (mixed >> 14)) & 0xFFFFFFFF) / 2**32


def skewed(
    *,
    count: int = 64,
    skew: float = 0.6,
    seed: int = 265056,
    longest: float = 18.83,
    pass_seconds: float = PASS_SECONDS,
) -> Workload:
    """Outputs of 64 tokens on average without skew; with it most are shorter and 15 % are long.

    Eight requests are there at the beginning, the others follow in gaps of 0 to 8 passes; prompts have 128 to 512
    tokens.

    Args:
        count: requests.
        skew: how far output lengths spread; 0: all the same.
        seed: same seed, same workload.
        longest: how far the longest output exceeds the others.
        pass_seconds: unit of the gaps.

    Raises:
        ValueError: names the value and the limit.
    """
    if count < 1:
        raise ValueError(f"a workload needs at least 1 request, got {count}")
    if not 0 <= skew <= 1:
        raise ValueError(f"the skew must be in [0, 1], got {skew}")
    numbers = mulberry32(seed)
    passes = 0
    asks = []
    for number in range(count):
        gap, prompt, kind, size = (next(numbers) for _ in range(4))
        passes += int(9 * gap) if number >= 8 else 0
        spread = longest * size if kind < 0.15 else -1.6 * size
        output = max(1, floor(64 * (1 + skew * spread) + 0.5))
        asks.append(
            Ask(
                number=number,
                arrival=passes * pass_seconds,
                input_tokens=128 + int(385 * prompt),
                output_tokens=output,
                max_tokens=output,
            )
        )
    return Workload(name=f"skew {skew:g}, seed {seed}", asks=tuple(asks))


# ---- read ----


def read_trace(path: Path, seed: int = 0) -> Workload:
    """A trace: CSV with ``arrival_s,input_tokens,output_tokens`` or Azure's ``TIMESTAMP,ContextTokens,GeneratedTokens``
    in its first line, or Mooncake's JSON lines; any of them compressed when the name ends in .gz.

    Time begins at the first request. ``max_tokens`` is the true length. Mooncake's blocks of equal hashes become equal
    token ids; where all its times are multiples of a second or more, requests are spread inside that tick (``seed``),
    in order.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file, the line and the value.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        lines = ((number, line.strip()) for number, line in enumerate(file, 1))
        rows = iter([(number, line) for number, line in lines if line])
    head = next(rows, None)
    if head is None:
        raise ValueError(f"{path}: no requests in it")
    if head[1].startswith("{"):
        return _mooncake(path, [head, *rows], seed)
    return _csv(path, head, rows)


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PLAIN = ("arrival_s", "input_tokens", "output_tokens")


def _csv(path: Path, head: tuple[int, str], rows: Iterable[tuple[int, str]]) -> Workload:
    columns = [name.strip() for name in head[1].split(",")]
    found = next((names for names in (_PLAIN, _AZURE) if set(names) <= set(columns)), None)
    if found is None:
        missing = ", ".join(name for name in _PLAIN if name not in columns)
        raise ValueError(
            f"{path}, line {head[0]}: no column {missing}: expected {','.join(_PLAIN)} or {','.join(_AZURE)}, "
            f"got {head[1]!r}"
        )
    places = [columns.index(name) for name in found]
    moment = _azure_ticks if found is _AZURE else float
    entries: list[_Entry] = []
    for number, line in rows:
        cells = line.split(",")
        with _At(path, number):
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells in {line!r}, but {len(columns)} columns")
            time, inputs, outputs = (cells[place].strip() for place in places)
            entries.append(_Entry(number, moment(time), time, int(inputs), int(outputs)))
    # ticks are whole numbers: the difference is exact
    scale = 1e7 if found is _AZURE else 1.0
    return _workload(path, entries, scale)


def _azure_ticks(text: str) -> int:
    """Units of 100 ns; the file has seven digits behind the point, and datetime takes six."""
    whole, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(whole) - datetime(1970, 1, 1)
    return (seconds.days * 86400 + seconds.seconds) * 10**7 + int((fraction or "0").ljust(7, "0")[:7])


def _mooncake(path: Path, rows: Sequence[tuple[int, str]], seed: int) -> Workload:
    entries = []
    for number, line in rows:
        with _At(path, number):
            row = json.loads(line)
            missing = [name for name in ("timestamp", "input_length", "output_length") if name not in row]
            if missing:
                raise ValueError(f"no field {', '.join(missing)} in {line[:80]!r}")
            for name in ("input_length", "output_length"):
                if type(row[name]) is not int:
                    raise ValueError(f"{name} must be a whole number, got {row[name]!r}")
            inputs = row["input_length"]
            hashes = row.get("hash_ids", [])
            if hashes and len(hashes) != -(-inputs // MOONCAKE_BLOCK):
                raise ValueError(f"{len(hashes)} hash_ids for {inputs} tokens: one for each {MOONCAKE_BLOCK} is needed")
            shared = tuple(
                Piece(2 * int(one) + 1, min(MOONCAKE_BLOCK, inputs - MOONCAKE_BLOCK * i))
                for i, one in enumerate(hashes)
            )
            time = float(row["timestamp"])
            entries.append(_Entry(number, time, str(row["timestamp"]), inputs, row["output_length"], shared))
    _check_order(path, entries)
    tick = gcd(*(int(entry.moment) for entry in entries)) if len(entries) > 1 else 0
    if tick < 1000:
        return _workload(path, entries, 1000.0)
    random = Random(f"{seed} tick")
    spread: dict[float, list[float]] = {}
    for entry in entries:
        spread.setdefault(entry.moment, []).append(random.random() * tick)
    for offsets in spread.values():
        offsets.sort(reverse=True)
    moved = [replace(entry, moment=entry.moment + spread[entry.moment].pop()) for entry in entries]
    work = _workload(path, moved, 1000.0)
    note = f"times are multiples of {tick / 1000:g} s: requests are spread inside them, seed {seed}"
    return replace(work, notes=(note,))


@dataclass(frozen=True, slots=True)
class _Entry:
    line: int
    moment: float
    text: str  # of the moment
    inputs: int
    outputs: int
    shared: tuple[Piece, ...] = ()


class _At:
    """Adds file and line to a bad value."""

    def __init__(self, path: Path, line: int) -> None:
        self._where = f"{path}, line {line}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError):
            raise ValueError(f"{self._where}: {error}") from error


def _check_order(path: Path, entries: Sequence[_Entry]) -> None:
    before = None
    for entry in entries:
        with _At(path, entry.line):
            if not (isfinite(entry.moment) and entry.moment >= 0):
                raise ValueError(f"time {entry.text} is not at least 0")
            if before is not None and entry.moment < before.moment:
                raise ValueError(f"time {entry.text} is before the {before.text} of line {before.line}")
        before = entry


def _workload(path: Path, entries: Sequence[_Entry], per_second: float) -> Workload:
    if not entries:
        raise ValueError(f"{path}: no requests in it")
    _check_order(path, entries)
    origin = entries[0].moment
    asks = []
    for number, entry in enumerate(entries):
        with _At(path, entry.line):
            asks.append(
                Ask(
                    number=number,
                    arrival=(entry.moment - origin) / per_second,
                    input_tokens=entry.inputs,
                    output_tokens=entry.outputs,
                    max_tokens=entry.outputs,
                    shared=entry.shared,
                )
            )
    return Workload(name=path.name, asks=tuple(asks))
