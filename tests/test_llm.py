"""The offline API: what users of ``hopon.LLM`` rely on."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopon import LLM, RequestOutput, SamplingParams
from hopon.core.config import EngineOptions
from hopon.core.plan import Deployment, Report
from hopon.core.types import Guide, GuideKind
from hopon.testing import load_ledger

DATA = Path(__file__).parent / "data"
STORIES = DATA / "stories260k"
GOLDEN: list[dict[str, Any]] = json.loads((DATA / "golden" / "stories260k.json").read_text())["cases"]

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def stories() -> Iterator[LLM]:
    """A real model of 260,000 parameters, in f32."""
    with LLM(STORIES, dtype="f32", threads=1, kv_cache_memory=16 << 20) as llm:
        yield llm


def _small_ledger(options: EngineOptions, report: Report) -> Deployment:
    return load_ledger(replace(options, model="512"), report)


@pytest.fixture
def ledger() -> Iterator[LLM]:
    """A device made of integers, whose answer depends on every token before it, behind a real tokenizer."""
    with LLM(STORIES, factory=_small_ledger, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        yield llm


def _ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_answers_are_the_golden_ones(stories: LLM) -> None:
    """Ids, texts and log-probabilities of a whole batch equal the reference implementation's."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    outputs = stories.generate([case["prompt_ids"] for case in GOLDEN], params, use_tqdm=False)
    for case, output in zip(GOLDEN, outputs, strict=True):
        [completion] = output.outputs
        assert completion.token_ids == case["greedy_ids"]
        assert completion.logprobs is not None
        chosen = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert chosen == pytest.approx(case["logprobs"], abs=1e-3)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert completion.finish_reason == "length"
        for entry in completion.logprobs:
            ranked = sorted((value for value in entry.values() if value.rank), key=lambda value: value.rank or 0)
            assert [value.rank for value in ranked] == [1, 2]
            assert ranked[0].logprob >= ranked[1].logprob


def test_v042_every_answer_belongs_to_its_prompt(ledger: LLM) -> None:
    """In two calls, with more prompts than seats, the i-th answer is what the i-th prompt gets alone."""
    for count in (13, 5):
        prompts = [[3 + (7 * i + j) % 400 for j in range(1 + (i * 5) % 23)] for i in range(count)]
        params = [SamplingParams(temperature=0, max_tokens=1 + (i * 3) % 11, ignore_eos=True) for i in range(count)]
        outputs = ledger.generate(prompts, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert [len(ids) for ids in _ids(outputs)] == [chosen.max_tokens for chosen in params]
        alone = [ledger.generate([prompt], chosen)[0] for prompt, chosen in zip(prompts, params, strict=True)]
        assert _ids(outputs) == _ids(alone)


def test_v068_all_forms_of_a_prompt_are_one(stories: LLM) -> None:
    """Text, ids and dictionaries of either give the same answer; ids are used as they are."""
    text = "Once upon a time"
    ids = stories.tokenizer.encode(text)
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = stories.generate([*forms, ids], GREEDY)
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len({tuple(answer) for answer in _ids(outputs)}) == 1
    for form in (*forms, ids):
        [output] = stories.generate(form, GREEDY)
        assert output.prompt_token_ids == ids
    assert outputs[0].prompt == text
    assert outputs[2].prompt is None


def test_guides_in_generate_and_chat(smollm2: Path) -> None:
    """Answers keep to their guides, each of a batch to its own; one that is not valid is an error that says so."""
    regex = Guide(GuideKind.REGEX, "[a-c]{2}-[0-9]{2}")
    choice = Guide(GuideKind.CHOICE, '["yes", "no"]')
    with LLM(smollm2, dtype="q4", max_model_len=128, kv_cache_memory=16 << 20) as llm:
        params = [SamplingParams(guide=guide, max_tokens=20, temperature=0.9) for guide in (regex, choice)]
        first, second = llm.generate(["A code:", "Yes or no?"], params, use_tqdm=False)
        assert re.fullmatch("[a-c]{2}-[0-9]{2}", first.outputs[0].text)
        assert second.outputs[0].text in ("yes", "no")
        assert first.outputs[0].finish_reason == second.outputs[0].finish_reason == "stop"
        [chat] = llm.chat([{"role": "user", "content": "Is it?"}], params[1], use_tqdm=False)
        assert chat.outputs[0].text in ("yes", "no")
        with pytest.raises(ValueError, match="unclosed group"):
            llm.generate("x", SamplingParams(guide=Guide(GuideKind.REGEX, "(")), use_tqdm=False)
        assert llm.generate("x", params[1], use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_no_prompts_no_answers(ledger: LLM) -> None:
    """An empty list is answered with an empty list."""
    assert ledger.generate([]) == []


def test_v055_stop_string_inside_a_token(stories: LLM) -> None:
    """A stop string that begins and ends inside tokens cuts the text just before it and names itself."""
    [free] = stories.generate("Once upon a time", GREEDY)
    text = free.outputs[0].text
    stop = text[20:25]
    [cut] = stories.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=32, stop=(stop,)))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    count = len(cut.outputs[0].token_ids)
    assert cut.outputs[0].token_ids == free.outputs[0].token_ids[:count]


def test_a_stop_token_ends_the_answer_and_is_not_shown(stories: LLM) -> None:
    """The token is the last of the ids, names itself, and its text is left out."""
    [free] = stories.generate("Once upon a time", GREEDY)
    ids = free.outputs[0].token_ids
    token = next(token for token in ids if ids.index(token) > 3)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop_token_ids=(token,))
    [cut] = stories.generate("Once upon a time", params)
    assert cut.outputs[0].token_ids == ids[: ids.index(token) + 1]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", token)
    before = SamplingParams(temperature=0, max_tokens=ids.index(token), ignore_eos=True)
    assert cut.outputs[0].text == stories.generate("Once upon a time", before)[0].outputs[0].text


def test_prompt_logprobs_cover_the_prompt(stories: LLM) -> None:
    """One entry per prompt token, none for the first, each with the token itself; independent of other requests."""
    ids = stories.tokenizer.encode("Once upon a time there was a little girl")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    alone, *crowd = (stories.generate(prompts, params)[0] for prompts in ([ids], [ids, ids[:5], ids]))
    assert alone.prompt_logprobs is not None
    assert alone.prompt_logprobs[0] is None
    assert len(alone.prompt_logprobs) == len(ids)
    assert all(
        entry is not None and token in entry for token, entry in zip(ids[1:], alone.prompt_logprobs[1:], strict=True)
    )
    assert crowd[0].prompt_logprobs == alone.prompt_logprobs
    assert stories.generate([ids])[0].prompt_logprobs is None


def test_v046_without_a_seed_answers_differ_with_one_they_repeat(stories: LLM) -> None:
    """Eight unseeded answers are not all alike; seeded ones are."""
    free = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    assert len({tuple(ids) for ids in _ids(stories.generate(["Once"] * 8, free))}) > 1
    seeded = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=7)
    assert len({tuple(ids) for ids in _ids(stories.generate(["Once"] * 4, seeded))}) == 1


def test_a_known_prefix_is_told(stories: LLM) -> None:
    """The second time, whole blocks of the prompt come from the cache, and the answer is the same."""
    ids = [1 + i % 400 for i in range(100)]
    first, second = (stories.generate([ids], GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 96
    assert _ids([first]) == _ids([second])


def test_a_prompt_that_never_fits_is_named(ledger: LLM) -> None:
    """The error has the prompt's index and the numbers, and the LLM goes on working."""
    with pytest.raises(ValueError, match=r"prompt 1: the prompt has 300 tokens.*max_model_len is 200"):
        ledger.generate([[5], list(range(300)), [6]], GREEDY)
    assert len(ledger.generate([[5]], GREEDY)) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 512], r"prompt 0: token id must be in \[0, 512\), got 512"),
        ([-1], r"prompt 0: token id must be in \[0, 512\), got -1"),
        ([[1], []], r"prompt 1: prompt must have at least one token"),
        ([[1], None], r"prompt 1 must be text or a list of token ids, got None"),
        ([["a", 1]], r"prompt 0 must be text or a list of token ids"),
        ({"text": "a"}, r"prompt 0 must be text or a list of token ids"),
        ([[True]], r"prompt 0 must be text or a list of token ids"),
    ],
)
def test_v067_what_is_no_prompt_is_refused(ledger: LLM, prompt: Any, message: str) -> None:
    """The error names the prompt by its index and the value; nothing is generated, and the LLM goes on working."""
    with pytest.raises(ValueError, match=message):
        ledger.generate(prompt, GREEDY)
    assert len(ledger.generate([[5]], GREEDY)) == 1


def test_one_set_of_parameters_or_one_each(ledger: LLM) -> None:
    """Another number of parameter sets is an error with both numbers."""
    with pytest.raises(ValueError, match=r"as many as prompts \(2\), got 3"):
        ledger.generate([[5], [6]], [GREEDY] * 3)


def test_a_chat_is_the_templates_text(smollm2: Path) -> None:
    """Conversations become the ids of the model's own template, and the text is shown as the prompt."""
    conversation = [{"role": "user", "content": "Hi"}]
    with LLM(smollm2, factory=load_ledger) as llm:
        one = llm.chat(conversation, GREEDY)
        two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "<|im_end|>"}]], GREEDY)
        assert [len(one), len(two)] == [1, 2]
        assert one[0].prompt_token_ids == two[0].prompt_token_ids == llm.tokenizer.encode_chat(conversation)
        assert one[0].prompt is not None
        assert one[0].prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_v072_a_model_without_a_template_cannot_chat(ledger: LLM) -> None:
    """The error says that there is no template."""
    with pytest.raises(ValueError, match="no chat template"):
        ledger.chat([{"role": "user", "content": "Hi"}])


def test_an_interrupt_keeps_what_is_finished_and_the_llm(ledger: LLM) -> None:
    """After Ctrl-C the answers told before stay told, nothing else is told, and the LLM answers as before."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 150, 150, 150, 150)]
    [before] = ledger.generate([[5]], params[0])
    told: list[int] = []

    def tell(index: int, output: RequestOutput) -> None:
        told.append(index)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        ledger.answer_each([[5], [6], [7], [8], [9]], params, tell)
    assert told == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    [after] = ledger.generate([[5]], params[0])
    assert _ids([before]) == _ids([after])


def test_refused_prompts_do_not_hold_up_the_others(ledger: LLM) -> None:
    """Told one by one, a prompt that cannot run is an error of its own."""
    outputs: dict[int, RequestOutput] = {}
    ledger.answer_each([[5], list(range(300)), [6]], [GREEDY] * 3, outputs.__setitem__)
    assert [bool(outputs[i].error) for i in range(3)] == [False, True, False]
    assert [len(outputs[i].outputs[0].token_ids) for i in range(3)] == [32, 0, 32]


def test_options_are_checked() -> None:
    """An unknown option and a bad value are errors that name them."""
    with pytest.raises(TypeError, match="no_such_option"):
        LLM(STORIES, factory=load_ledger, no_such_option=1)
    with pytest.raises(ValueError, match=r"block_size .* got 17"):
        LLM(STORIES, factory=load_ledger, block_size=17)
