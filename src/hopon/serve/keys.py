"""API keys: who may come in, and under which name.

Keys are compared as digests, each with all of them, so that the time tells nothing. What leaves this module is a name
made of a digest; the keys themselves are kept nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class Keys:
    """Keys that open the server.

    Args:
        keys: texts without spaces; none at all leaves the server open.

    Raises:
        ValueError: a key is empty or cannot be sent in a header.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = []
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must be printable ASCII characters without spaces, at least one")
            self._digests.append(_digest(key.encode()))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Who sends these headers (``authorization: Bearer KEY`` or ``x-api-key: KEY``); None where no key fits."""
        sent = b""
        for field, value in headers:
            if field == b"authorization" and value[:7].lower() == b"bearer ":
                sent = value[7:].strip()
                break
            if field == b"x-api-key":
                sent = value.strip()
        digest = _digest(sent)
        known = False
        for other in self._digests:
            known |= hmac.compare_digest(digest, other)
        return digest.hex()[:12] if known else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"hopon key " + key).digest()


def label(text: str) -> str:
    """A short name for a text that a client sent: bounded, and not the text itself."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
