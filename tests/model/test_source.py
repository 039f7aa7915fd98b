"""Opening models: what is read from either format, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hopon.model.source import open_source
from tests.model.files import tiny_config, write_folder, write_gguf
from tests.model.reference import random_checkpoint


def test_both_formats_give_the_same_configuration(tmp_path: Path) -> None:
    """A folder and a GGUF of one checkpoint differ in the rotation convention alone."""
    config = tiny_config()
    weights = random_checkpoint(config)
    folder = open_source(write_folder(tmp_path / "hf", config, weights, shards=3))
    file = open_source(write_gguf(tmp_path / "m.gguf", config, weights))
    assert (folder.kind, file.kind) == ("huggingface", "gguf")
    assert not folder.config.rope.interleaved
    assert file.config.rope.interleaved
    for name in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(folder.config, name) == getattr(file.config, name)
    assert folder.config.context_length == file.config.context_length == 256
    assert (folder.float32("layers.1.ffn.up.weight", 3, 7) == file.float32("layers.1.ffn.up.weight", 3, 7)).all()
    assert len(folder.files) == 3


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_gguf_rotates_halves(tmp_path: Path, arch: str) -> None:
    """Only llama files have permuted q and k."""
    config = tiny_config(architectures=[f"{arch.capitalize()}ForCausalLM"])
    source = open_source(write_gguf(tmp_path / "m.gguf", config, random_checkpoint(config), arch=arch))
    assert not source.config.rope.interleaved
    assert source.config.family == arch
    assert source.config.qkv_bias == (arch == "qwen2")


@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_unsupported_architecture(tmp_path: Path, kind: str) -> None:
    """The error has the architecture's name and the list of those that are supported."""
    config = tiny_config()
    weights = random_checkpoint(config)
    if kind == "gguf":
        path = write_gguf(tmp_path / "m.gguf", config, weights, arch="gemma3")
        with pytest.raises(ValueError, match=r"m\.gguf: architecture 'gemma3' is not supported \(llama, qwen2, qwen3"):
            open_source(path)
    else:
        path = write_folder(tmp_path, config | {"architectures": ["FalconForCausalLM"]}, weights)
        with pytest.raises(ValueError, match=r"config\.json: architecture FalconForCausalLM .*\(LlamaForCausalLM, "):
            open_source(path)


def test_v088_tied_with_an_equal_head(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A tied model that also stores its head is accepted; the copy is not used."""
    config = tiny_config(tie_word_embeddings=True)
    weights = random_checkpoint(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert open_source(write_folder(tmp_path, config, weights)).config.tied
    assert not recwarn.list


def test_v088_tied_with_another_head(tmp_path: Path) -> None:
    """A stored head that really differs is used, with a warning."""
    config = tiny_config(tie_word_embeddings=True)
    weights = random_checkpoint(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * np.float32(2)
    with pytest.warns(UserWarning, match=r"declared tied, but lm_head\.weight differs"):
        source = open_source(write_folder(tmp_path, config, weights))
    assert not source.config.tied


def test_v089_missing_head_is_not_tied_silently(tmp_path: Path) -> None:
    """An untied model without its head does not start."""
    config = tiny_config()
    weights = random_checkpoint(config)
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match=r"1 tensors are missing: lm_head\.weight"):
        open_source(write_folder(tmp_path, config, weights))


@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_v089_missing_and_unused_tensors_are_listed(tmp_path: Path, kind: str) -> None:
    """Whatever is missing or has no place in the model is named."""
    config = tiny_config()
    weights = random_checkpoint(config)
    del weights["model.layers.1.mlp.up_proj.weight"]

    def path() -> Path:
        if kind == "gguf":
            return write_gguf(tmp_path / "m.gguf", config, weights)
        return write_folder(tmp_path, config, weights)

    with pytest.raises(ValueError, match=r"1 tensors are missing: .*1\.(ffn_up|mlp\.up_proj)\.weight"):
        open_source(path())
    weights = random_checkpoint(config)
    weights["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    with pytest.raises(ValueError, match=r"1 tensors have no place in a llama model: .*0\.(attn|self_attn\.)_?q_norm"):
        open_source(path())


def test_wrong_shape(tmp_path: Path) -> None:
    """A tensor of another shape than the configuration says is named with both shapes and its file."""
    config = tiny_config()
    weights = random_checkpoint(config)
    weights["model.norm.weight"] = np.ones(64, np.float32)
    with pytest.raises(
        ValueError, match=r"model\.safetensors: tensor model\.norm\.weight has shape \(64,\), .*\(96,\)"
    ):
        open_source(write_folder(tmp_path, config, weights))


def test_v093_gguf_without_output_is_tied(tmp_path: Path) -> None:
    """A GGUF without output.weight uses the embedding as the head."""
    config = tiny_config(tie_word_embeddings=True)
    assert open_source(write_gguf(tmp_path / "m.gguf", config, random_checkpoint(config))).config.tied


def test_v094_rope_freqs_are_used(tmp_path: Path) -> None:
    """The extra tensor of newer llama files becomes the frequency divisors."""
    config = tiny_config()
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", config, random_checkpoint(config), extra={"rope_freqs.weight": divisors})
    assert open_source(path).config.rope.divisors == tuple(divisors.tolist())


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    """Linear and yarn metadata are read; others stop the start."""
    config = tiny_config()
    weights = random_checkpoint(config)
    keys: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    keys["rope.scaling.original_context_length"] = 64
    scaling = open_source(write_gguf(tmp_path / "m.gguf", config, weights, metadata=keys)).config.rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 64)
    with pytest.raises(ValueError, match="rope scaling 'longrope' is not supported"):
        open_source(write_gguf(tmp_path / "m.gguf", config, weights, metadata=keys | {"rope.scaling.type": "longrope"}))


def test_end_tokens_of_a_folder_are_the_union(tmp_path: Path) -> None:
    """V051: config, generation_config and tokenizer may each declare end tokens; all count."""
    config = tiny_config(eos_token_id=[2, 3])
    write_folder(tmp_path, config, random_checkpoint(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.6, "top_k": 20}))
    tokenizer = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"7": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    source = open_source(tmp_path)
    assert source.config.eos_ids == (2, 3, 5, 7)
    assert source.generation == {"temperature": 0.6, "top_k": 20}


def test_end_tokens_of_a_gguf(tmp_path: Path) -> None:
    """Declared end tokens, and control tokens with a well-known text; a normal token of that text is none."""
    config = tiny_config(eos_token_id=1)
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>"]
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 1],
        "tokenizer.ggml.eot_token_id": 4,
    }
    path = write_gguf(tmp_path / "m.gguf", config, random_checkpoint(config), metadata=keys)
    assert open_source(path).config.eos_ids == (1, 2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 4}, "num_heads 6 must be a multiple of num_kv_heads 4"),
        ({"hidden_size": "big"}, "hidden_size must be a number, got 'big'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"eos_token_id": 1000}, "end-of-sequence token 1000"),
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A setting that we would have to ignore stops the start, with its name and the file."""
    config = tiny_config()
    write_folder(tmp_path, config | change, random_checkpoint(config))
    with pytest.raises(ValueError, match=message) as error:
        open_source(tmp_path)
    assert "config.json" in str(error.value)


def test_sliding_window_caps_the_context(tmp_path: Path) -> None:
    """Within its window a sliding-window model is an ordinary one; longer sequences are not served."""
    config = tiny_config(architectures=["MistralForCausalLM"], sliding_window=100)
    assert open_source(write_folder(tmp_path, config, random_checkpoint(config))).config.context_length == 100


def test_no_such_path(tmp_path: Path) -> None:
    """A path that is not there is named."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_source(tmp_path / "nowhere")
