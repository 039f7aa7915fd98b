"""Sees every batch that goes through the kernels, by either of the two calls that take one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hopon import native

See = Callable[[native.Model, native.Batch], None]


def watch_batches(monkeypatch: pytest.MonkeyPatch, see: See) -> None:
    """Call ``see`` before every forward pass from now on, with the program and the batch."""
    forward, step = native.Library.forward, native.Library.step

    def seen_forward(library: native.Library, pool: native.Pool, model: native.Model, batch: native.Batch) -> None:
        see(model, batch)
        forward(library, pool, model, batch)

    def seen_step(
        library: native.Library,
        pool: native.Pool,
        model: native.Model,
        batch: native.Batch,
        sampling: native.Sampling,
    ) -> None:
        see(model, batch)
        step(library, pool, model, batch, sampling)

    monkeypatch.setattr(native.Library, "forward", seen_forward)
    monkeypatch.setattr(native.Library, "step", seen_step)
