"""Flags of a load and of the server that is asked, which several measuring commands have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

SIMULATE = "simulate"
"""What ``--target`` says to ask the simulator instead of a server."""


class ArrivalKind(StrEnum):
    """How drawn requests are spaced."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


class Endpoint(StrEnum):
    """Which part of the API is asked."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Mix(StrEnum):
    """What is asked."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    MIXED = "mixed"


ModelName = Annotated[str, typer.Option("--model", help="Name in requests. (Default: the first that it serves.)")]
ServeFlags = Annotated[str, typer.Option(help='Flags of `hopon serve` for a model, such as "--dtype bf16".')]
Header = Annotated[list[str] | None, typer.Option(metavar="NAME:VALUE", help="A header of every request.")]
Timeout = Annotated[float, typer.Option(help="Seconds until a request is given up.")]


def share_of(text: str) -> float:
    """A share of requests, as it is written."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"--attain is a share such as 95% or 0.95, got {text!r}") from None


def shape_of(workload: Mix, input_len: str, output_len: str) -> str:
    """The workload in words."""
    return f"{input_len} tokens in, {output_len} out" if workload is Mix.RANDOM else workload.value
