"""Vocabularies: how a model cuts text into tokens, read from a GGUF file's metadata or a Hugging Face folder.

Built on the ``tokenizers`` library. It knows the ids, how they spell bytes, which of them are control tokens and which
end a text; encoding and decoding are the text layer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from hopon.model.weights.gguf import GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types of GGUF

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen 2 and Llama 3 cut text into words; they differ in how many digits stay together."""

_END_TEXTS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>")
)
"""Control tokens that end a turn. GGUF files often declare one end token although the model uses two of these."""

Kind = Literal["byte-level", "sentencepiece", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What a tokenizer is made of, from whichever file.

    Args:
        library: the ``tokenizers`` object that parses special tokens.
        kind: how tokens spell bytes: GPT-2's byte alphabet, "▁" and ``<0xAB>``, or something that only the library's
            own decoder understands.
        pieces: spelling of every id.
        special: ids of control tokens: hidden by default, never made from chat content.
        literal: ids whose spelling is plain text although the kind says otherwise (added tokens).
        add_bos: whether the beginning-of-sequence token goes in front of a raw prompt; None: the library object's
            post-processor knows.
        strips_space: whether the space that the encoder put in front is taken away from a whole text again.
        eos_ids: every declared end token.
        tokens: names (``bos_token``, ...) to texts, for chat templates.
        chat_templates: template texts by name; the ordinary one is called "default".
    """

    library: tokenizers.Tokenizer
    kind: Kind
    pieces: Sequence[str]
    special: frozenset[int]
    literal: frozenset[int]
    add_bos: bool | None
    bos_id: int | None
    strips_space: bool
    eos_ids: frozenset[int]
    tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Of a ``.gguf`` file or a Hugging Face folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: it does not hold a tokenizer that is supported.
    """
    path = Path(path)
    return folder_vocabulary(path) if path.is_dir() else gguf_vocabulary(GGUF(path).metadata)


# ---- bytes ----


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on. Maps to the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


def spell(vocabulary: Vocabulary) -> list[bytes]:
    """Bytes of every id."""
    pieces, literal = vocabulary.pieces, vocabulary.literal
    if vocabulary.kind == "byte-level":
        alphabet = _byte_alphabet()

        def letters(piece: str) -> bytes:
            try:
                return piece.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:  # a word with letters from outside the alphabet is plain text
                return piece.encode()

    elif vocabulary.kind == "sentencepiece":
        byte = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

        def letters(piece: str) -> bytes:
            match = byte.match(piece)
            return bytes.fromhex(match[1]) if match else piece.replace("▁", " ").encode()

    else:

        def letters(piece: str) -> bytes:
            return piece.encode()

    table = [letters(piece) for piece in pieces]
    for i in literal:
        table[i] = pieces[i].encode()
    return table


# ---- GGUF ----


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """From the metadata of a GGUF file (keys ``tokenizer.*``).

    Raises:
        ValueError: a key is missing, or names a scheme that is not supported.
    """

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"tokenizer.ggml.{key} must be a {kind.__name__}, got {type(value).__name__}")
        return value

    scheme = get("model", str)
    pieces = get("tokens", list)
    if scheme is None or not pieces:
        raise ValueError("the file holds no tokenizer: tokenizer.ggml.model or tokenizer.ggml.tokens is missing")
    types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())] or [_NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(pieces)} tokens")
    if scheme == "gpt2":
        library, add_bos = _byte_level(pieces, get("merges", list), get("pre", str, "default"))
    elif scheme == "llama":
        library, add_bos = _sentencepiece(pieces, metadata, types, get("add_space_prefix", bool, True))
    else:
        raise ValueError(f"tokenizer.ggml.model {scheme!r} is not supported; supported are 'gpt2' and 'llama'")

    control = [i for i, kind in enumerate(types) if kind == _CONTROL]
    defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
    library.add_special_tokens([AddedToken(pieces[i], normalized=False, special=True) for i in control])
    library.add_tokens([AddedToken(pieces[i], normalized=False, special=False) for i in defined])

    tokens, ids = {}, {}
    for ours, theirs in _GGUF_NAMES.items():
        i = get(f"{theirs}_token_id", int)
        if i is not None:
            if not 0 <= i < len(pieces):
                raise ValueError(f"tokenizer.ggml.{theirs}_token_id must be in [0, {len(pieces)}), got {i}")
            ids[ours], tokens[ours] = i, pieces[i]
    ends = {ids[name] for name in ("eos_token", "eot_token", "eom_token") if name in ids}
    ends |= {i for i in control if pieces[i] in _END_TEXTS}
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        library=library,
        kind="byte-level" if scheme == "gpt2" else "sentencepiece",
        pieces=pieces,
        special=frozenset(control),
        literal=frozenset(control + defined),
        add_bos=get("add_bos_token", bool, add_bos),
        bos_id=ids.get("bos_token"),
        strips_space=scheme == "llama" and bool(get("add_space_prefix", bool, True)),
        eos_ids=frozenset(ends),
        tokens=tokens,
        chat_templates={"default": template} if isinstance(template, str) else {},
    )


_GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "eot_token": "eot",
    "eom_token": "eom",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def _byte_level(pieces: list[str], merges: list[str] | None, pre: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether its models want a BOS unless the file says otherwise."""
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing")
    ignore_merges = pre in _LLAMA_3
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    library.pre_tokenizer = _pre_tokenizer(pre)
    return library, ignore_merges


_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_GPT_2 = ("default", "gpt-2", "gpt2")


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging, by the name that GGUF files give it."""
    if pre in _GPT_2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        # Without the digit splitter whitespace in front of digits gets wrong ids.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre == "qwen2" or pre in _LLAMA_3:
        words = Regex(_WORDS % ("{1,3}" if pre in _LLAMA_3 else ""))
        cut = pre_tokenizers.Split(words, behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(("smollm", "qwen2", *_LLAMA_3, *_GPT_2))
    raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {known}")


def _sentencepiece(
    pieces: list[str], metadata: Mapping[str, Any], types: list[int], prefix: bool
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: the best-scored merge goes first, so every way to build a piece is a merge of its rank."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(pieces):
        raise ValueError(f"tokenizer.ggml.scores must have one entry for each of the {len(pieces)} tokens")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    ranked: list[tuple[float, int, str, str]] = []
    for i, piece in enumerate(pieces):
        if types[i] == _NORMAL:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocab and right in vocab:
                    ranked.append((-float(scores[i]), i, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=any(kind == _BYTE for kind in types),
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    return library, True


# ---- Hugging Face folders ----


def folder_vocabulary(folder: Path) -> Vocabulary:
    """From ``tokenizer.json`` and what else a folder says of tokens and templates: configurations, generation defaults,
    ``chat_template.jinja``.

    Raises:
        OSError: there is no tokenizer.json.
        ValueError: a file is not what it should be.
    """
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: {error}") from error
    library.no_truncation()
    library.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    decoder = json.loads(text).get("decoder")
    kind, strips_space = _decoder_kind(decoder)

    added = library.get_added_tokens_decoder()
    spelled = {i: piece for piece, i in library.get_vocab(with_added_tokens=True).items()}
    padded = _read_json(folder / "config.json").get("vocab_size")  # models may have more rows than there are tokens
    size = max(max(spelled) + 1, padded if isinstance(padded, int) else 0)
    pieces = [spelled.get(i, "") for i in range(size)]
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    ids = {name: library.token_to_id(value) for name, value in tokens.items()}
    ends = {ids[name] for name in ("eos_token",) if ids.get(name) is not None}
    for name in ("config.json", "generation_config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        ends |= set(declared if isinstance(declared, list) else [] if declared is None else [declared])
    rule = config.get("add_bos_token")
    if isinstance(rule, bool) and ids.get("bos_token") is None:
        rule = None
    return Vocabulary(
        library=library,
        kind=kind,
        pieces=pieces,
        special=frozenset(i for i, token in added.items() if token.special),
        literal=frozenset(added),
        add_bos=rule if isinstance(rule, bool) else None,
        bos_id=ids.get("bos_token"),
        strips_space=strips_space,
        eos_ids=frozenset(i for i in ends if isinstance(i, int)),
        tokens=tokens,
        chat_templates=_folder_templates(folder, config),
    )


def _decoder_kind(decoder: Mapping[str, Any] | None) -> tuple[Kind, bool]:
    """How tokens spell bytes, and whether the first space of a text goes; from a tokenizer.json's decoder."""
    if decoder is None:
        return "other", False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return "byte-level", False
    if names == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return "sentencepiece", steps[0].get("prepend_scheme", "always") != "never"
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == space and steps[3:] in ([], [strip]):
        return "sentencepiece", len(steps) == 4
    return "other", False


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": path.read_text(encoding="utf-8")}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}
    return {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
