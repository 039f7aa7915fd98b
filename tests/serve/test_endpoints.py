"""The small endpoints: tokenize, detokenize, ready, load, version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hopon
from hopon.serve.tokenizer import Tokenizer
from tests.serve.conftest import Server, at_once, eventually, running, write_model
from tests.serve.test_api import HI


def post(server: Server, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokenize_texts_and_conversations(server: Server, tokenizer: Tokenizer) -> None:
    """A text's ids are those of a completion, a conversation's those of a chat, of any length; names on demand."""
    text = post(server, "/tokenize", model="fake", prompt="Hello there, <|im_end|>")
    ids = tokenizer.encode("Hello there, <|im_end|>")
    assert text == {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": None}
    assert ids[-1] == 2
    named = post(server, "/tokenize", prompt="Hello there", return_token_strs=True)
    assert named["token_strs"] == ["Hello", " there"]
    chat = post(server, "/tokenize", messages=HI)
    assert chat["tokens"] == server.chat(HI, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    open_end = post(server, "/tokenize", messages=HI, add_generation_prompt=False)
    assert open_end["tokens"] == tokenizer.encode_chat(HI, False)
    assert post(server, "/tokenize", prompt="word " * 3000)["count"] >= 3000
    assert post(server, "/tokenize", prompt="")["tokens"] == []


def test_detokenize_is_the_way_back(server: Server) -> None:
    """The text of ids, control tokens spelled out."""
    for text in ("Hello there", "naïve 🙂 <|im_end|>", ""):
        ids = post(server, "/tokenize", prompt=text)["tokens"]
        assert post(server, "/detokenize", tokens=ids) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 10**7}, "prompt"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    """A 400 with the field, as everywhere."""
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_tokenizer_describes_itself(server: Server, tokenizer: Tokenizer) -> None:
    """Special tokens that /tokenize maps to one id each, the template that chats use; null for what is not declared."""
    info = server.http.get("/tokenizer_info").json()
    assert post(server, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [2]
    assert info["bos_token"] == "<|im_start|>"
    assert info["pad_token"] is None
    assert info["chat_template"] == tokenizer.vocabulary.chat_templates["default"]
    assert (info["vocab_size"], info["model_max_length"]) == (tokenizer.vocab_size, 1024)


def test_unknown_models_are_not_found(server: Server) -> None:
    """A name that is not served is a 404 here too."""
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert server.http.post(path, json={"model": "gpt-4", **body}).status_code == 404


def test_version_and_load(server: Server) -> None:
    """The version; and how many answers are open, each choice counted."""
    assert server.http.get("/version").json() == {"version": hopon.__version__}
    eventually(lambda: server.http.get("/load").json() == {"server_load": 0})
    with server.begin({"prompt": [12, 99], "n": 3, "max_tokens": 500, "ignore_eos": True}):
        eventually(lambda: server.http.get("/load").json() == {"server_load": 3})
    eventually(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_ready_while_requests_are_taken(tmp_path: Path) -> None:
    """A working and a busy server are ready; one that drains is not, although it is healthy, and says why."""
    with running(write_model(tmp_path / "model", fake={"step_time": 0.02}), engine={"max_num_seqs": 2}) as server:
        assert server.http.get("/ready").json() == {"ready": True, "reason": ""}
        at_once(6, lambda i: server.complete([50 + i], max_tokens=3))
        with server.begin({"prompt": [50], "max_tokens": 900, "ignore_eos": True, "stream": True}) as sock:
            assert sock.recv(1)
            assert server.http.get("/ready").status_code == 200
            with server.client() as other:
                other.get("/ready")
                server.process.terminate()
                eventually(lambda: other.get("/ready").status_code == 503)
                assert other.get("/ready").json() == {"ready": False, "reason": "the server is shutting down"}
                assert other.get("/health").status_code == 200
        server.end()
