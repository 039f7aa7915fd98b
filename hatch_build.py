"""Packaging hook: compiles the kernels into the wheel, or in place for an editable install.

Where the system has no C++ compiler the build asks for the ziglang wheel, which is one.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_builder(root: Path) -> ModuleType:
    """The module ``hopon.native.build`` by its path: importing the package would need hopon's dependencies."""
    spec = importlib.util.spec_from_file_location("hopon_native_build", root / "src" / "hopon" / "native" / "build.py")
    assert spec is not None, "a path to a .py file always has a spec"
    assert spec.loader is not None, "a path to a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelBuildHook(BuildHookInterface[Any]):
    """Builds every level of this machine's architecture; the wheel is for any Python 3 on this platform."""

    def dependencies(self) -> list[str]:
        """What the build environment must have beyond hatchling."""
        return [] if load_builder(Path(self.root)).system_compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; ``version`` is "standard" or "editable"."""
        libraries = load_builder(Path(self.root)).build()
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version == "standard":
            build_data["artifacts"] += [f"/{path.relative_to(self.root)}" for path in libraries]
