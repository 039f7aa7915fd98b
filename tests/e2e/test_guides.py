"""Guides on a real model: outputs keep to them, and are the same alone, in a crowd, after preemption and replay."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema

from hopon.core.config import EngineOptions
from hopon.core.engine import Command
from hopon.core.types import FinishReason, Guide, GuideKind, Request, SamplingParams
from hopon.serve.tokenizer import Tokenizer
from tests.e2e.test_identity import Answer, serve
from tests.model.test_guide import PERSON

DATE = r"\d{4}-\d{2}-\d{2}"
CHOICES = ["north", "north-east", "south"]
GUIDES = {
    "schema": Guide(GuideKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Guide(GuideKind.REGEX, DATE),
    "choice": Guide(GuideKind.CHOICE, json.dumps(CHOICES)),
    "grammar": Guide(GuideKind.GRAMMAR, 'start: "<" item ("," item){2} ">"\nitem: /[a-z]{1,6}/'),
}


def requests_of(tokenizer: Tokenizer, count: int, seed: int) -> list[Request]:
    """Guided and free requests, of all kinds and ways to sample."""
    rng = random.Random(seed)
    kinds = [*GUIDES, "free", "free"]
    made = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        text = rng.choice(["Describe a person.", "When and where was it? " * rng.randint(1, 12), "Go on:"])
        made.append(
            Request(
                request_id=f"{kind} {i}",
                prompt=tuple(tokenizer.encode(text)),
                seed=rng.getrandbits(64),
                stop_token_ids=() if kind == "free" else tuple(tokenizer.eos_ids),
                params=SamplingParams(
                    temperature=rng.choice([0.0, 0.8, 1.5]),
                    top_p=rng.choice([1.0, 0.9]),
                    frequency_penalty=rng.choice([0.0, 0.5]),
                    min_tokens=rng.choice([0, 0, 8]),
                    max_tokens=120 if kind == "free" else 160,
                    logprobs=1,
                    guide=GUIDES.get(kind),
                ),
            )
        )
    return made


def check(tokenizer: Tokenizer, request: Request, answer: Answer) -> None:
    """The output ended by itself and is what its guide says. A schema may be cut off in white space."""
    kind = request.request_id.partition(" ")[0]
    if kind == "free":
        return
    text = tokenizer.decode(answer[0])
    if kind == "schema" and answer[3] is FinishReason.LENGTH:  # white space between members may go on and on
        assert re.search(r"\s{8}", text), (request.request_id, text)
        return
    assert answer[3] is FinishReason.STOP, (request.request_id, text)
    match kind:
        case "schema":
            jsonschema.validate(json.loads(text), PERSON)
        case "regex":
            assert re.fullmatch(DATE, text, re.ASCII)
        case "choice":
            assert text in CHOICES
        case "grammar":
            assert re.fullmatch("<[a-z]{1,6}(,[a-z]{1,6}){2}>", text)


def options_of(model: Path, **changes: object) -> EngineOptions:
    return EngineOptions(**{"model": str(model), "dtype": "q4", "max_model_len": 270, "num_kv_blocks": 256} | changes)  # type: ignore[arg-type]


def test_guided_outputs_keep_to_their_guides_in_any_crowd(smollm2: Path, effort: Callable[[int, int], int]) -> None:
    """Guided requests among free ones, with a pool so small that they are preempted, get what they get alone."""
    tokenizer = Tokenizer.load(smollm2)
    requests = requests_of(tokenizer, effort(18, 120), 5)
    at_once: list[tuple[float, Command]] = [(i / 8, request) for i, request in enumerate(requests)]
    crowd, stats = serve(
        options_of(smollm2, num_kv_blocks=70, block_size=4, max_num_batched_tokens=48, max_num_seqs=16), at_once
    )
    assert stats.num_preemptions > 0
    alone, _ = serve(
        options_of(smollm2, max_num_seqs=1, enable_prefix_caching=False, threads=1),
        [(0.0, request) for request in requests],
    )
    for request in requests:
        check(tokenizer, request, crowd[request.request_id])
        assert crowd[request.request_id] == alone[request.request_id], request.request_id


def test_guided_outputs_go_on_behind_what_was_delivered(smollm2: Path) -> None:
    """Replayed from any point of its output, a guided request goes on to the same end."""
    tokenizer = Tokenizer.load(smollm2)
    [request] = [r for r in requests_of(tokenizer, 5, 6) if r.request_id.startswith("schema")]
    options = options_of(smollm2)
    whole = serve(options, [(0.0, request)])[0][request.request_id]
    cuts = range(1, len(whole[0]), 7)
    replayed = [
        Request(
            request_id=str(cut),
            prompt=request.prompt,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            params=request.params,
            output=whole[0][:cut],
        )
        for cut in cuts
    ]
    answers, _ = serve(options, [(0.0, request) for request in replayed])
    for cut in cuts:
        assert answers[str(cut)][0] == whole[0][cut:]
        assert answers[str(cut)][1] == whole[1][cut:]
        assert answers[str(cut)][3] is whole[3]


def test_a_guide_that_fails_ends_its_own_request_only(smollm2: Path) -> None:
    """Guides that cannot be compiled, or that no token can follow, are refused; a neighbour is not disturbed."""
    tokenizer = Tokenizer.load(smollm2)
    [neighbour] = [r for r in requests_of(tokenizer, 5, 6) if r.request_id.startswith("regex")]
    bad = {
        "invalid": Guide(GuideKind.REGEX, "("),
        "unsupported": Guide(GuideKind.JSON_SCHEMA, '{"uniqueItems": true}'),
        "no token": Guide(GuideKind.REGEX, "\x14"),
        "no token later": Guide(GuideKind.REGEX, "ab\x14"),
    }
    events: list[tuple[float, Command]] = [
        (
            0.0,
            Request(
                request_id=name,
                prompt=(5, 6),
                seed=1,
                stop_token_ids=(2,),
                params=SamplingParams(guide=guide),
            ),
        )
        for name, guide in bad.items()
    ]
    answers, _ = serve(options_of(smollm2), [*events, (0.0, neighbour)])
    alone, _ = serve(options_of(smollm2), [(0.0, neighbour)])
    assert all(answers[name][3] is FinishReason.REFUSED for name in bad)
    assert answers[neighbour.request_id] == alone[neighbour.request_id]


def test_a_complete_guide_ends_without_a_stop_token(smollm2: Path) -> None:
    """ignore_eos and min_tokens do not prolong what can only end; a guide that may end at once ends with no tokens."""
    answers, _ = serve(
        options_of(smollm2),
        [
            (
                0.0,
                Request(
                    request_id="abc", prompt=(5,), seed=1, params=SamplingParams(guide=Guide(GuideKind.REGEX, "abc"))
                ),
            ),
            (
                0.0,
                Request(
                    request_id="min",
                    prompt=(5,),
                    seed=1,
                    stop_token_ids=(2,),
                    params=SamplingParams(guide=Guide(GuideKind.REGEX, "abc"), min_tokens=10),
                ),
            ),
            (
                0.0,
                Request(
                    request_id="empty", prompt=(5,), seed=1, params=SamplingParams(guide=Guide(GuideKind.REGEX, ""))
                ),
            ),
        ],
    )
    tokenizer = Tokenizer.load(smollm2)
    assert tokenizer.decode(answers["abc"][0]) == tokenizer.decode(answers["min"][0]) == "abc"
    assert answers["empty"][0] == ()
    assert {answer[3] for answer in answers.values()} == {FinishReason.STOP}
