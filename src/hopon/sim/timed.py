"""A simulated device that moves a virtual clock: with it the real engine runs in simulated time."""

from __future__ import annotations

from hopon.core.clock import VirtualClock
from hopon.core.plan import StepPlan, StepResult
from hopon.sim.loop import Pace
from hopon.sim.tokens import SimulatedDevice
from hopon.tracing import features


class TimedDevice:
    """An executor whose steps run one after another, each as long as a pace says.

    Args:
        device: yields the tokens.
        pace: says how long.
        clock: is moved when a result is waited for.
    """

    def __init__(self, device: SimulatedDevice, pace: Pace, clock: VirtualClock) -> None:
        self._device = device
        self._pace = pace
        self._clock = clock
        self._busy_until = clock.now()

    def submit(self, plan: StepPlan) -> _TimedStep:
        """Start a step behind those submitted before."""
        start = max(self._clock.now(), self._busy_until)
        self._busy_until = self._pace.finish(plan, features(plan), start)
        return _TimedStep(self._device.submit(plan).result(), self._busy_until, self._clock)

    def close(self) -> None:
        """Nothing to release."""


class _TimedStep:
    def __init__(self, result: StepResult, done: float, clock: VirtualClock) -> None:
        self._result = result
        self._done = done
        self._clock = clock

    def result(self) -> StepResult:
        if self._done > self._clock.now():
            self._clock.advance_to(self._done)
        return self._result
