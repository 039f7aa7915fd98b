"""Executor factories with something wrong: real or fake models whose steps are slow, or kill the engine process."""

from __future__ import annotations

import os
import signal
import time

from hopon.core.config import EngineOptions
from hopon.core.plan import Deployment, Executor, Report, StepHandle, StepPlan
from hopon.model.cpu import load
from hopon.testing import load_ledger

STEP_TIME = 0.008
"""Seconds that every step of a slow model takes at least, so that a test can do something in the middle."""


class Slow:
    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(STEP_TIME)
        return self._inner.submit(plan)

    def close(self) -> None:
        self._inner.close()


class Deadly:
    """A step with a request whose prompt begins with ``token`` kills the process, from the output ``index`` on."""

    def __init__(self, inner: Executor, token: int) -> None:
        self._inner = inner
        self._token = token
        self._rows: dict[int, tuple[int, ...]] = {}

    def submit(self, plan: StepPlan) -> StepHandle:
        for row in plan.closed:
            self._rows.pop(row)
        for opened in plan.opened:
            self._rows[opened.row] = opened.prompt
        for chunk in plan.chunks:
            prompt = self._rows[chunk.row]
            # the second token of the prompt says behind which output the request becomes deadly
            if prompt[0] == self._token and chunk.start + chunk.count >= len(prompt) + prompt[1]:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._inner.submit(plan)

    def close(self) -> None:
        self._inner.close()


DEADLY = 7


def load_slow(options: EngineOptions, report: Report) -> Deployment:
    """A real model in no hurry."""
    deployment = load(options, report)
    return Deployment(executor=Slow(deployment.executor), config=deployment.config, summary=deployment.summary)


def load_slow_ledger(options: EngineOptions, report: Report) -> Deployment:
    """Integers in no hurry."""
    deployment = load_ledger(options, report)
    return Deployment(executor=Slow(deployment.executor), config=deployment.config, summary=deployment.summary)


def load_deadly_ledger(options: EngineOptions, report: Report) -> Deployment:
    """Integers; prompts that begin with DEADLY kill."""
    deployment = load_slow_ledger(options, report)
    executor = Deadly(deployment.executor, DEADLY)
    return Deployment(executor=executor, config=deployment.config, summary=deployment.summary)
