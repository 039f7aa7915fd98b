"""Programs of the families, before they meet memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopon.model.families import build_program
from hopon.native import OpKind
from tests.model.test_kv import SMOLLM2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_behind_the_last_attention_only_rows_that_want_logits_go_on(family: str) -> None:
    """The other rows of a prompt are spared the rest of the last layer, and no layer before it."""
    program = build_program(replace(SMOLLM2, family=family))
    last = max(place for place, op in enumerate(program.ops) if op.kind is OpKind.ATTENTION)
    assert not any(op.on_logits for op in program.ops[: last + 1])
    assert all(op.on_logits for op in program.ops[last + 1 :])
    assert program.num_body_ops == last + 1
    selected = {op.source: op.target for op in program.ops if op.kind is OpKind.SELECT}
    assert set(selected) == {"attended", "residual"}
    assert not set(program.buffers) & set(program.logit_buffers)
    written = set(selected.values())
    for op in program.ops[last + 1 + len(selected) :]:
        assert op.source in written, "nothing behind the selection reads rows that were not selected"
        assert not op.accumulate or op.target in written
        written.add(op.target)
