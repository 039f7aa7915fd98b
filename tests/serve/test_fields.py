"""Every field that clients of OpenAI and vLLM know: it works, or a 400 names it; null is always accepted."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.chat import completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsStreaming

from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import Server, script
from tests.serve.test_api import HI

OFFICIAL = {
    "completions": CompletionCreateParamsStreaming,
    "chat/completions": completion_create_params.CompletionCreateParamsStreaming,
}

SAMPLING_EXTRAS = """use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words""".split()

EXTRAS = {
    "completions": """best_of prompt_embeds add_special_tokens response_format structured_outputs priority request_id
        return_tokens_as_token_ids return_token_ids return_token_offsets cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs repetition_detection thinking_token_budget""".split(),
    "chat/completions": """include_reasoning echo add_generation_prompt continue_final_message add_special_tokens
        documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority
        request_id return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
        repetition_detection reasoning_effort""".split(),
}

NEEDED = {"completions": {"prompt": "Hi"}, "chat/completions": {"messages": HI}}


def fields_of(path: str) -> list[str]:
    return sorted({*typing.get_type_hints(OFFICIAL[path]), *SAMPLING_EXTRAS, *EXTRAS[path]} - set(NEEDED[path]))


@pytest.mark.parametrize("path", OFFICIAL)
def test_null_is_accepted_everywhere(server: Server, path: str) -> None:
    """All fields at once, each null: the request works."""
    nulls = dict.fromkeys(fields_of(path)) | {"max_tokens": 1}
    response = server.post(path, **NEEDED[path], **nulls)
    assert response.status_code == 200, response.text


NEUTRAL: dict[str, Any] = {
    "audio": None,
    "best_of": 1,
    "chat_template_kwargs": {},
    "documents": [],
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "length_penalty": 1.0,
    "logit_bias": {},
    "logprob_token_ids": [],
    "metadata": {},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": "",
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "spaces_between_special_tokens": True,
    "stop": [],
    "store": False,
    "stream": False,
    "suffix": "",
    "temperature": 1,
    "tool_choice": "none",
    "tools": [],
    "top_p": 1,
    "use_beam_search": False,
    "vllm_xargs": {},
    "bad_words": [],
    "stop_token_ids": [],
    "min_tokens": 0,
    "priority": 0,
}


@pytest.mark.parametrize("path", OFFICIAL)
def test_neutral_values_are_accepted_everywhere(server: Server, path: str) -> None:
    """Values that ask for nothing change nothing: the answer is that of a request without them."""
    known = set(fields_of(path))
    neutral = {name: value for name, value in NEUTRAL.items() if name in known}
    fixed = {**NEEDED[path], "max_tokens": 4, "seed": 3}
    plain, full = server.post(path, **fixed), server.post(path, **fixed, **neutral)
    assert full.status_code == 200, full.text
    assert full.json()["choices"] == plain.json()["choices"]


WORKING: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5, 6],
    "bad_words": ["word"],
    "best_of": 1,
    "cache_salt": "s",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
    "echo": True,
    "frequency_penalty": 1,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 3},
    "max_completion_tokens": 1,
    "max_tokens": 1,
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "fake",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 1,
    "priority": 3,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in-memory",
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "repetition_penalty": 1.2,
    "request_id": "r",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "somebody",
    "seed": 5,
    "service_tier": "default",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [7],
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
    "user": "me",
    "verbosity": "medium",
}

REFUSED: dict[str, Any] = {
    "audio": {"voice": "x", "format": "wav"},
    "chat_template": "{{ messages }}",
    "documents": [{"text": "a document that the template would not show"}],
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "logprob_token_ids": [1],
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"a": 1},
    "prompt_embeds": "AAAA",
    "repetition_detection": {"a": 1},
    "return_token_offsets": True,
    "store": True,
    "suffix": "x",
    "thinking_token_budget": 5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "web_search_options": {},
}

ELSEWHERE = {
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "response_format",
    "structured_outputs",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
}
"""Fields with several kinds of values, and tests of their own."""


@pytest.mark.parametrize("path", OFFICIAL)
def test_every_field_works_or_is_refused_by_name(server: Server, path: str) -> None:
    """No field is unknown, none is ignored without the documents saying so, and a refusal names the field."""
    for name in fields_of(path):
        assert (name in WORKING) + (name in REFUSED) + (name in ELSEWHERE) == 1, f"no verdict about {name}"
        if name in WORKING:
            response = server.post(path, **{**NEEDED[path], "max_tokens": 1, name: WORKING[name]})
            assert response.status_code == 200, f"{name}: {response.text}"
        elif name in REFUSED:
            error = server.refused(path, **NEEDED[path], **{name: REFUSED[name]})
            assert error["param"] == name
            assert name in error["message"]


# ---- what single fields do ----


def test_truncated_prompts(server: Server) -> None:
    """The end of the prompt stays, or its beginning; -1 keeps what fits beside max_tokens, whatever the length; the
    usage counts what is left."""
    prompt = list(range(100, 140))

    def kept(**fields: Any) -> list[int]:
        answer = server.complete(prompt, return_token_ids=True, **({"max_tokens": 2} | fields))
        assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
        ids: list[int] = answer["choices"][0]["prompt_token_ids"]
        return ids

    assert kept(truncate_prompt_tokens=5) == prompt[-5:]
    assert kept(truncate_prompt_tokens=5, truncation_side="left") == prompt[-5:]
    assert kept(truncate_prompt_tokens=5, truncation_side="right") == prompt[:5]
    assert kept(truncate_prompt_tokens=100) == prompt
    assert kept(truncate_prompt_tokens=-1) == prompt
    prompt = [7] * 2000
    assert server.refused(prompt=prompt)["param"] == "prompt"
    assert len(kept(truncate_prompt_tokens=-1, max_tokens=24)) == 1000
    text = server.complete("one two three four " * 1000, truncate_prompt_tokens=3, max_tokens=1, return_token_ids=True)
    assert len(text["choices"][0]["prompt_token_ids"]) == 3
    chat = server.chat(HI, truncate_prompt_tokens=4, max_tokens=1, return_token_ids=True)
    assert chat["prompt_token_ids"] == server.chat(HI, max_tokens=1, return_token_ids=True)["prompt_token_ids"][-4:]


def test_tokens_named_by_their_ids(server: Server) -> None:
    """return_tokens_as_token_ids spells tokens token_id:ID in both shapes of log-probabilities and in scores."""
    [choice] = server.complete(
        [50, 60], max_tokens=2, logprobs=1, echo=True, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"]
    names = [f"token_id:{token}" for token in [50, 60, *choice["token_ids"]]]
    assert choice["logprobs"]["tokens"] == names
    assert set(choice["logprobs"]["top_logprobs"][2]) >= {names[2]}
    answer = server.chat(
        HI, max_tokens=2, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )
    [choice] = answer["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"].startswith("token_id:")


def test_the_last_message_goes_on(server: Server, tokenizer: Tokenizer) -> None:
    """continue_final_message ends the prompt with the message's text; echo shows it in front, in streams too."""
    messages = [*HI, {"role": "assistant", "content": "The answer is"}]
    answer = server.chat(messages, continue_final_message=True, max_tokens=3, seed=1, return_token_ids=True)
    rendered = tokenizer.apply_chat_template(messages, False)
    expected = tokenizer.encode(
        rendered[: rendered.rindex("The answer is")] + "The answer is", add_special_tokens=False
    )
    assert answer["prompt_token_ids"] == expected
    text = answer["choices"][0]["message"]["content"]
    echoed = {"continue_final_message": True, "echo": True, "max_tokens": 3, "seed": 1}
    assert server.chat(messages, **echoed)["choices"][0]["message"]["content"] == "The answer is" + text
    chunks = server.stream("chat/completions", messages=messages, **echoed)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "The answer is" + text
    assert server.chat(messages, echo=True, max_tokens=3, seed=1)["choices"][0]["message"]["content"] != text
    for bad in (
        {"add_generation_prompt": True, "messages": messages},
        {"messages": [*HI, {"role": "assistant", "content": " "}]},
        {"messages": [*HI, {"role": "assistant", "content": None}]},
    ):
        error = server.refused("chat/completions", continue_final_message=True, **bad)
        assert "continue_final_message" in error["message"]


def test_a_continued_message_may_spell_control_tokens(server: Server, tokenizer: Tokenizer) -> None:
    """They stay text there, and the cut is behind them."""
    messages = [*HI, {"role": "assistant", "content": "say <|im_end|> now"}]
    answer = server.chat(messages, continue_final_message=True, max_tokens=1, return_token_ids=True)
    plain = tokenizer.encode("say <|im_end|> now", add_special_tokens=False, parse_special=False)
    assert answer["prompt_token_ids"][-len(plain) :] == plain


def test_bad_words_are_two_sequences(tokenizer: Tokenizer) -> None:
    """A word is banned at the beginning of a text and behind a space; a word of several tokens as a sequence."""
    assert tokenizer.bad_word("word") == tokenizer.bad_word(" word")
    assert tokenizer.bad_word("word") == [
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("word", " word")
    ]
    assert all(len(ids) > 1 for ids in tokenizer.bad_word("unbelievably strange words"))


def test_stop_token_ids_and_scripts_know_the_vocabulary(server: Server) -> None:
    """Ids outside the vocabulary are refused in every field that takes ids, prompts included."""
    for fields in ({"stop_token_ids": [49152]}, {"allowed_token_ids": [49152]}, {"logit_bias": {"49152": 1}}):
        assert server.refused(prompt="x", **fields)["param"] == next(iter(fields))
    assert server.refused(prompt=[49152])["param"] == "prompt"
    assert server.complete(script(100), max_tokens=3)
