"""Text to token ids and back, for one model.

Vocabularies are read by :mod:`hopon.model.vocabulary`; chat templates are in :mod:`hopon.serve.chat`, incremental
decoding in :mod:`hopon.serve.stream`. It knows nothing of requests.

Special tokens in text: raw completions parse them ("<|im_end|>" in a prompt is the control token), as everybody else
does. The content of chat messages must not smuggle control tokens in, so it is encoded with that parsing off: see
:meth:`Tokenizer.encode` and :mod:`hopon.serve.chat`. Tokens that a vocabulary calls "user defined" (``<tool_call>``)
are text with an id of its own, not control, and are always parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from hopon.model.vocabulary import Vocabulary, folder_vocabulary, gguf_vocabulary, read_vocabulary, spell
from hopon.serve.chat import ChatTemplate, Guard, Message, flatten


class Tokenizer:
    """Encodes and decodes for one model. Methods may be called from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._parsing = vocabulary.library
        self._plain = _without_special(vocabulary)
        self._bytes = spell(vocabulary)
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

    def bad_word(self, word: str) -> list[tuple[int, ...]]:
        """The token sequences that spell a word at the beginning of a text and behind a space.

        The second one counts where it differs from the first token on and is as long, as in vLLM: else it is a space
        before the first.
        """
        bare = word.lstrip()
        first = tuple(self.encode(bare, add_special_tokens=False))
        second = tuple(self.encode(f" {bare}", add_special_tokens=False))
        return [first, second] if first and len(second) == len(first) and second[0] != first[0] else [first]

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
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, as the template has it. For ids use :meth:`encode_chat`, which guards content.

        Raises:
            ValueError: see :meth:`hopon.serve.chat.ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_special_tokens: bool = False,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Ids of a conversation. The template alone makes control tokens; in messages they are ordinary text.

        A template writes the BOS itself where its model wants one. With ``add_special_tokens`` the model's rule is
        applied on top, but never a second BOS.

        Raises:
            ValueError: see :meth:`hopon.serve.chat.ChatTemplate.render`.
        """
        flat = [flatten(message, i) for i, message in enumerate(messages)]
        (flat, tools, kwargs), mark = self._guard.protect((flat, tools, kwargs))
        text = self.apply_chat_template(
            flat, add_generation_prompt, tools, kwargs, continue_final_message=continue_final_message
        )
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
        return cls(read_vocabulary(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (keys ``tokenizer.*``).

        Raises:
            ValueError: a key is missing, or names a scheme that is not supported.
        """
        return cls(gguf_vocabulary(metadata))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From ``tokenizer.json`` and, where present, ``tokenizer_config.json``, ``chat_template.jinja``,
        ``config.json`` and ``generation_config.json``.

        Raises:
            OSError: there is no tokenizer.json.
            ValueError: a file is not what it should be.
        """
        return cls(folder_vocabulary(Path(folder)))


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
