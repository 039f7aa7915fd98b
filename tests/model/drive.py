"""Runs requests through the engine and the CPU executor, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hopon.core.config import EngineOptions
from hopon.core.engine import Engine
from hopon.core.plan import Deployment
from hopon.core.scheduler import Scheduler
from hopon.core.types import FinishReason, Logprob, Request, SamplingParams
from hopon.model.cpu import load


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: FinishReason | None = None


@contextmanager
def deployed(path: Path, **options: Any) -> Iterator[Deployment]:
    """A loaded model; closed at the end."""
    deployment = load(EngineOptions(model=str(path), **options), lambda what, done: None)
    try:
        yield deployment
    finally:
        deployment.executor.close()


def request(name: str, prompt: Sequence[int], *, seed: int = 0, stop: Sequence[int] = (), **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt=tuple(prompt),
        params=SamplingParams(**({"temperature": 0.0} | params)),
        seed=seed,
        stop_token_ids=tuple(stop),
    )


def run(deployment: Deployment, requests: Sequence[Request], scheduler: Scheduler | None = None) -> dict[str, Output]:
    """All requests at once, to their ends; what an earlier engine delivered of an output comes first."""
    engine = Engine(scheduler or Scheduler(deployment.config), deployment.executor)
    outputs = {r.request_id: Output(tokens=list(r.output)) for r in requests}
    commands: Sequence[Request] = requests
    while commands or engine.scheduler.has_work:
        for delta in engine.step(commands):
            output = outputs[delta.request_id]
            assert delta.index == len(output.tokens)
            output.tokens += delta.tokens
            output.logprobs += delta.logprobs
            output.prompt_logprobs += delta.prompt_logprobs
            output.finish = delta.finish
        commands = ()
    return outputs
