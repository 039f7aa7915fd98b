"""Continuous batching for language models on CPUs.

The public names are loaded when they are first used, so that importing a part of hopon does not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hopon.core.types import FinishReason, SamplingParams
    from hopon.llm import LLM, CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "FinishReason", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "hopon.llm",
    "CompletionOutput": "hopon.llm",
    "RequestOutput": "hopon.llm",
    "FinishReason": "hopon.core.types",
    "SamplingParams": "hopon.core.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
