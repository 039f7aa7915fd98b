"""Text to ids and back: the vectors of real models, all sources, control tokens, chats."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hopon.model.weights.gguf import GGUF
from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import DATA, vectors, write_model

STORIES = DATA.parents[1] / "data" / "stories260k"


@pytest.fixture(scope="session")
def smollm_gguf(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def check_vectors(tokenizer: Tokenizer, name: str) -> None:
    content = vectors(name)
    for case in content["strings"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    for case in content["chats"]:
        prompt = case["add_generation_prompt"]
        assert tokenizer.apply_chat_template(case["messages"], prompt) == case["text"]
        assert tokenizer.encode_chat(case["messages"], prompt) == case["ids"]


def test_smollm_folder_equals_the_vectors(tokenizer: Tokenizer) -> None:
    """A tokenizer.json gives the reference ids, texts and chats."""
    check_vectors(tokenizer, "smollm")


def test_smollm_gguf_equals_the_vectors(smollm_gguf: Tokenizer) -> None:
    """GGUF metadata gives the reference ids, texts and chats (the digit rule among them)."""
    check_vectors(smollm_gguf, "smollm")


def test_qwen2_gguf_equals_the_vectors(qwen_coder: Path) -> None:
    """The second word-cutting rule gives the reference ids, texts and chats."""
    check_vectors(Tokenizer.load(qwen_coder), "qwen2")


def test_gguf_and_folder_agree(smollm_gguf: Tokenizer, tokenizer: Tokenizer) -> None:
    """Both sources of one vocabulary have the same bytes for every id."""
    assert smollm_gguf.vocab_size == tokenizer.vocab_size
    for i in range(tokenizer.vocab_size):
        assert smollm_gguf.token_bytes(i) == tokenizer.token_bytes(i)
    assert smollm_gguf.special_ids == tokenizer.special_ids


def test_gguf_metadata_becomes_a_tokenizer_quickly(smollm2: Path) -> None:
    """Building costs less than half a second of this thread's time, which start-up counts on."""
    metadata = GGUF(smollm2).metadata
    start = time.thread_time()
    Tokenizer.from_gguf(metadata)
    assert time.thread_time() - start < 0.5


def spellable(text: str) -> str:
    """Without the characters that SmolLM cannot spell: its vocabulary has no tokens for these bytes."""
    missing = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    return "".join(c for c in text if not missing & set(c.encode()))


SPELLABLE = st.text(max_size=60).map(spellable)


@settings(max_examples=200, deadline=None)
@given(SPELLABLE)
def test_byte_level_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Any text survives encoding and decoding, and the bytes of its tokens are its own."""
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert not tokenizer.special_ids & set(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=20))
def test_decoding_random_ids_equals_the_library(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Ill-formed byte sequences too come out as the library's own decoder has them."""
    expected = tokenizer.vocabulary.library.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == expected


def stories_metadata() -> dict[str, Any]:
    """The GGUF metadata that a conversion of stories260k has: scores fall with the rank of the merge."""
    model = json.loads((STORIES / "tokenizer.json").read_text())["model"]
    vocab = sorted(model["vocab"], key=lambda piece: int(model["vocab"][piece]))
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(model["merges"]):
        rank.setdefault(left + right, i)
    types = [2] + [3] * 2 + [6] * 256 + [1] * (len(vocab) - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.scores": [-float(rank.get(piece, 10**6)) for piece in vocab],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abcdeth .,OT\n\u00e9\U0001f642"), max_size=40))
def test_sentencepiece_gguf_equals_the_folder(text: str) -> None:
    """A "llama" vocabulary from GGUF metadata encodes and decodes as its tokenizer.json, byte fallback included."""
    ours = Tokenizer.from_gguf(stories_metadata())
    library = tokenizers.Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == library.decode(ids)


def test_bos_rules() -> None:
    """The model's rule decides about the BOS in front of raw prompts, and only there."""
    metadata = stories_metadata()
    assert Tokenizer.from_gguf(metadata).encode("a")[0] == 1
    assert 1 not in Tokenizer.from_gguf(metadata).encode("a", add_special_tokens=False)
    assert 1 not in Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("a")
    assert Tokenizer.from_gguf(metadata).encode("") == [1]


def test_bos_rule_of_a_folder(tmp_path: Path) -> None:
    """add_bos_token of tokenizer_config.json is obeyed where tokenizer.json itself adds nothing."""
    folder = write_model(tmp_path, tokenizer_config={"add_bos_token": True})
    assert Tokenizer.load(folder).encode("Hello world") == [1, 19556, 905]
    assert Tokenizer.load(write_model(tmp_path)).encode("Hello world") == [19556, 905]


def test_v051_end_tokens_are_the_union_of_all_declarations(tokenizer: Tokenizer, smollm_gguf: Tokenizer) -> None:
    """config.json, generation_config.json and the tokenizer disagree, and each is believed; GGUF adds known names."""
    assert tokenizer.eos_ids == {0, 2, 17}
    assert smollm_gguf.eos_ids == {0, 2}


def test_v073_exactly_one_bos_on_the_chat_path(tmp_path: Path) -> None:
    """A template that writes the BOS, and a tokenizer that adds one: chats have one, raw prompts follow the rule."""
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = write_model(tmp_path, template=template, tokenizer_config={"add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    messages = [{"role": "user", "content": "Hello world"}]
    assert tokenizer.encode_chat(messages) == [1, 19556, 905]
    assert tokenizer.encode_chat(messages, add_special_tokens=True) == [1, 19556, 905]
    assert tokenizer.encode("Hello world") == [1, 19556, 905]


SPELLINGS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_<|im_end|>end|>", "<repo_name>")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*SPELLINGS, "user\n", " hi ", "\x7f", "\ue000", "<", "|"]), max_size=8).map("".join))
def test_messages_cannot_smuggle_control_tokens(tokenizer: Tokenizer, content: str) -> None:
    """Whatever a message says, the chat has the control tokens of the template, and the text arrives whole."""
    harmless = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    control = tokenizer.special_ids
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    assert content in tokenizer.decode(ids, skip_special_tokens=False)


def test_raw_text_parses_control_tokens_unless_told_not_to(tokenizer: Tokenizer) -> None:
    """Both ways to encode text."""
    assert tokenizer.encode("<|im_end|>") == [2]
    assert 2 not in tokenizer.encode("<|im_end|>", parse_special=False)


def test_v071_content_forms(tokenizer: Tokenizer) -> None:
    """Parts are the joined string, null is the empty string, other parts are refused by name."""

    def chat(content: Any) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": content}])

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(parts) == chat("one\ntwo")
    assert chat(None) == chat("") == chat([])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\].*'image_url'"):
        chat([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}])


def test_v072_no_chat_template(tmp_path: Path) -> None:
    """Without a template texts work, and a chat's error says what to do."""
    tokenizer = Tokenizer.load(write_model(tmp_path, template=None))
    assert tokenizer.encode("Hello world") == [19556, 905]
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_template_extras(tmp_path: Path) -> None:
    """What templates expect: loop controls, tojson, strftime_now, generation blocks, extra variables, tools."""
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "|{{ {'a': '<é>'} | tojson }}|{{ strftime_now('%Y') | length }}|{{ mood }}|{{ tools[0].name }}"
        "{# knows <tool_call> #}"
    )
    tokenizer = Tokenizer.load(write_model(tmp_path, template=template))
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    text = tokenizer.apply_chat_template(messages, tools=[{"name": "f"}], kwargs={"mood": "good"})
    assert text == 'one|{"a": "<é>"}|4|good|f'


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "not allowed"),
        ("{{ messages[7].content }}", "refuses this conversation"),
    ],
)
def test_template_errors_are_value_errors(tmp_path: Path, template: str, match: str) -> None:
    """What a template refuses, and what the sandbox stops, is an error about the conversation."""
    tokenizer = Tokenizer.load(write_model(tmp_path, template=template))
    with pytest.raises(ValueError, match=match):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_template_variables_cannot_be_overridden(tokenizer: Tokenizer) -> None:
    """chat_template_kwargs cannot replace the messages."""
    with pytest.raises(ValueError, match="'messages'"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], kwargs={"messages": []})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores must have one entry"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for 512 tokens"),
        ({"tokenizer.ggml.eos_token_id": 512}, r"eos_token_id must be in \[0, 512\), got 512"),
        ({"tokenizer.ggml.model": "gpt2"}, "merges is missing"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "x"}, "'x' is not supp"),
    ],
)
def test_v095_broken_metadata_is_named(change: dict[str, Any], match: str) -> None:
    """A file without usable tokenizer metadata is an error that says what is wrong."""
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_gguf(stories_metadata() | change)


def test_ids_out_of_range_are_errors(tokenizer: Tokenizer) -> None:
    """Decoding never makes something up."""
    with pytest.raises(ValueError, match=r"must be in \[0, 49152\), got 49152"):
        tokenizer.decode([49152])


def test_fewest_tokens_is_a_lower_bound(tokenizer: Tokenizer) -> None:
    """The bound that refuses huge prompts early never refuses one that fits."""
    for text in (" " * 4000, "-" * 4000, "a b c " * 300, "\n" * 1000):
        assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text))
