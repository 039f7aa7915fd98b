"""One page per model family: each states the program of its models, op by op."""

from __future__ import annotations

from hopon.model.config import ModelConfig
from hopon.model.families import llama, qwen2, qwen3
from hopon.model.program import Program


def build_program(config: ModelConfig) -> Program:
    """The program of a model, from its family's page."""
    builders = {"llama": llama.build, "qwen2": qwen2.build, "qwen3": qwen3.build}
    return builders[config.family](config)
