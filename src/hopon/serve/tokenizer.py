"""Text to token ids and back, for one model.

Built on the ``tokenizers`` library from a GGUF file's metadata or from a Hugging Face folder. It knows vocabularies,
special tokens and how a vocabulary spells bytes; chat templates are in :mod:`hopon.serve.chat`, incremental decoding
in :mod:`hopon.serve.stream`. It knows nothing of requests.

Special tokens in text: raw completions parse them ("<|im_end|>" in a prompt is the control token), as everybody else
does. The content of chat messages must not smuggle control tokens in, so it is encoded with that parsing off: see
:meth:`Tokenizer.encode` and :mod:`hopon.serve.chat`. Tokens that a vocabulary calls "user defined" (``<tool_call>``)
are text with an id of its own, not control, and are always parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from hopon.serve.chat import ChatTemplate, Guard, Message, flatten

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


class Tokenizer:
    """Encodes and decodes for one model. Methods may be called from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._parsing = vocabulary.library
        self._plain = _without_special(vocabulary)
        self._bytes = _spell(vocabulary)
        self._guard = Guard(vocabulary.pieces[i] for i in vocabulary.special)
        self.chat_template = ChatTemplate(vocabulary.chat_templates, vocabulary.tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids; valid ids are below it."""
        return len(self.vocabulary.pieces)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that the model's files declare as an end of text or turn."""
        return self.vocabulary.eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens."""
        return self.vocabulary.special

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        """Spelling of every control token to its id."""
        return {self.vocabulary.pieces[i]: i for i in sorted(self.vocabulary.special)}

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest spelling: a text of n bytes has at least n / longest_token tokens."""
        return max((len(spelling) for spelling in self._bytes), default=1)

    def fewest_tokens(self, num_chars: int) -> int:
        """A lower bound for the tokens of a text of that many characters, without encoding it; 0 when there is none."""
        library = self._parsing
        steady = self.vocabulary.kind == "sentencepiece" and library.token_to_id("<0x00>") is not None
        steady |= self.vocabulary.kind == "byte-level" and library.normalizer is None
        return -(-num_chars // self.longest_token) if steady else 0

    @property
    def is_bytewise(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes."""
        return self.vocabulary.kind != "other"

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for.

        Raises:
            ValueError: there is no such id.
        """
        if not 0 <= token < len(self._bytes):
            raise ValueError(f"token id must be in [0, {len(self._bytes)}), got {token}")
        return self._bytes[token]

    def token_text(self, token: int) -> str:
        """A printable form of one token; bytes that are no UTF-8 by themselves come out as replacement characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: put the model's BOS in front when the model wants one.
            parse_special: control tokens spelled out in the text become those tokens; else they are ordinary text.
        """
        if not text and not add_special_tokens:
            return []
        library = self._parsing if parse_special else self._plain
        rule = self.vocabulary.add_bos
        # The batch form lets other threads run meanwhile and does not compute character offsets.
        [encoding] = library.encode_batch_fast([text], add_special_tokens=add_special_tokens and rule is None)
        ids: list[int] = encoding.ids
        if add_special_tokens and rule and self.vocabulary.bos_id is not None:
            ids.insert(0, self.vocabulary.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence.

        For bytewise vocabularies: the bytes, read as UTF-8, each ill-formed part as one replacement character.

        Raises:
            ValueError: an id is out of range.
        """
        if not self.is_bytewise:
            return self._parsing.decode(list(ids), skip_special_tokens=skip_special_tokens)
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in hidden]).decode("utf-8", "replace")
        return text[1:] if self.vocabulary.strips_space and text.startswith(" ") else text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as the template has it. For ids use :meth:`encode_chat`, which guards content.

        Raises:
            ValueError: see :meth:`hopon.serve.chat.ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, kwargs=kwargs
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Ids of a conversation. The template alone makes control tokens; in messages they are ordinary text.

        A template writes the BOS itself where its model wants one. With ``add_special_tokens`` the model's rule is
        applied on top, but never a second BOS.

        Raises:
            ValueError: see :meth:`hopon.serve.chat.ChatTemplate.render`.
        """
        flat = [flatten(message, i) for i, message in enumerate(messages)]
        (flat, tools, kwargs), mark = self._guard.protect((flat, tools, kwargs))
        text = self.apply_chat_template(flat, add_generation_prompt, tools, kwargs)
        ids = self._encode_marked(text, mark) if mark else self.encode(text, add_special_tokens=False)
        if add_special_tokens:
            start = self.encode("", add_special_tokens=True)
            ids = ids if ids[: len(start)] == start else start + ids
        return ids

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        parts = self._guard.split(text)
        added = self.vocabulary.library.get_added_tokens_decoder()
        ids: list[int] = []
        for i in range(0, len(parts), 2):
            part = parts[i]
            before = self.special_texts[parts[i - 1]] if i else None
            after = self.special_texts[parts[i + 1]] if i + 1 < len(parts) else None
            if before is not None and before in added and added[before].rstrip:
                part = part.lstrip()
            if after is not None and after in added and added[after].lstrip:
                part = part.rstrip()
            if part:
                ids += self.encode(part.replace(mark, ""), add_special_tokens=False, parse_special=False)
            if after is not None:
                ids.append(after)
        return ids

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a ``.gguf`` file or a Hugging Face folder.

        Raises:
            OSError: a file cannot be read.
            ValueError: it does not hold a tokenizer that is supported.
        """
        path = Path(path)
        if path.is_dir():
            return cls.from_folder(path)
        from hopon.model.weights.gguf import GGUF

        return cls.from_gguf(GGUF(path).metadata)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (keys ``tokenizer.*``).

        Raises:
            ValueError: a key is missing, or names a scheme that is not supported.
        """
        return cls(_gguf_vocabulary(metadata))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From ``tokenizer.json`` and, where present, ``tokenizer_config.json``, ``chat_template.jinja``,
        ``config.json`` and ``generation_config.json``.

        Raises:
            OSError: there is no tokenizer.json.
            ValueError: a file is not what it should be.
        """
        return cls(_folder_vocabulary(Path(folder)))


# ---- bytes ----


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on. Maps to the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


def _spell(vocabulary: Vocabulary) -> list[bytes]:
    """Bytes of every id."""
    pieces, literal = vocabulary.pieces, vocabulary.literal
    if vocabulary.kind == "byte-level":
        alphabet = _byte_alphabet()

        def spell(piece: str) -> bytes:
            try:
                return piece.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:  # a word with letters from outside the alphabet is plain text
                return piece.encode()

    elif vocabulary.kind == "sentencepiece":
        byte = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

        def spell(piece: str) -> bytes:
            match = byte.match(piece)
            return bytes.fromhex(match[1]) if match else piece.replace("▁", " ").encode()

    else:

        def spell(piece: str) -> bytes:
            return piece.encode()

    table = [spell(piece) for piece in pieces]
    for i in literal:
        table[i] = pieces[i].encode()
    return table


def _without_special(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A tokenizer on the same model that takes control tokens for ordinary text."""
    library = vocabulary.library
    plain = tokenizers.Tokenizer(library.model)
    if library.normalizer is not None:
        plain.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        plain.pre_tokenizer = library.pre_tokenizer
    added = library.get_added_tokens_decoder()
    plain.add_tokens([token for i, token in sorted(added.items()) if i not in vocabulary.special])
    return plain


# ---- GGUF ----


def _gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
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


def _folder_vocabulary(folder: Path) -> Vocabulary:
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
