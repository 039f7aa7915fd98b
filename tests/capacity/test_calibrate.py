"""How predictions are put beside what was measured."""

from __future__ import annotations

from array import array

import pytest

from hopon.capacity.calibrate import Row, compared
from hopon.core.types import FinishReason
from hopon.metrics import RequestRecord


def heard(ttft: float, gap: float) -> RequestRecord:
    times = array("d", [ttft + gap * i for i in range(5)])
    return RequestRecord(
        request_id="a",
        arrival=0.0,
        input_tokens=3,
        admitted=0.0,
        token_times=times,
        cached_tokens=0,
        ended=times[-1],
        finish=FinishReason.LENGTH,
        source=0,
    )


def test_v112_v116_errors_that_cancel_are_seen() -> None:
    """A first token that is predicted too early and gaps that are too long by as much leave E2E right; both show."""
    measured, predicted = compared([heard(1.0, 0.25)]), compared([heard(0.2, 0.45)])
    rows = {name: Row(name=name, measured=(value,), predicted=predicted[name]) for name, value in measured.items()}
    errors = {name: row.error for name, row in rows.items()}
    assert errors["TTFT p50"] == pytest.approx(-0.8)
    assert errors["ITL p95"] == pytest.approx(0.8)
    assert errors["E2E p50"] == pytest.approx(0.0)
    assert errors["tokens/s"] == pytest.approx(0.0)
    assert rows["TTFT p50"].cells()[-2:] == ["-80.0%", "NO"]
    assert rows["E2E p95"].cells()[-1] == "yes"


@pytest.mark.parametrize(("measured", "predicted"), [((), 1.0), ((None,), 1.0), ((0.0,), 1.0), ((1.0,), None)])
def test_v116_what_cannot_be_compared_has_no_error(measured: tuple[float | None, ...], predicted: float | None) -> None:
    """Neither infinite nor NaN: a dash."""
    assert Row(name="x", measured=measured, predicted=predicted).cells()[-2:] == ["-", "-"]
