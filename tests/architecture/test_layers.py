"""Imports point down only, importing the core imports the standard library only, and the environment is read once."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hopon

ROOT = Path(hopon.__file__).parent

LAYERS: dict[str, int] = {
    "core": 0,
    "metrics": 1,
    "workload": 1,
    "tracing": 1,
    "testing": 1,
    "native": 1,
    "hub": 1,
    "jsonl": 1,
    "policies": 1,
    "catalogue": 2,
    "model": 2,
    "torch_backend": 2,
    "sim": 2,
    "serve": 3,
    "bench": 3,
    "report": 3,
    "lab": 3,
    "capacity": 4,
    "llm": 4,
    "compare": 4,
    "reproduce": 5,
    "cli": 6,
    "__main__": 7,
}
"""Parts of hopon; a part may import parts of lower layers. ``hopon`` itself, the lazy names, belongs to none."""


def _modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules that are imported anywhere in a file, function bodies too, but not those for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _imports(other)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None, "only a relative import has no module"
            for alias in node.names:  # "from hopon import native" names a part by its alias
                yield f"{node.module}.{alias.name}", node.lineno
        else:
            yield from _imports(node)


def _part(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "hopon" and len(parts) > 1 and parts[1] in LAYERS else None


def _violations(module: str, source: str) -> list[str]:
    here = _part(module)
    if here is None:
        return []
    found = []
    for imported, line in _imports(ast.parse(source)):
        there = _part(imported)
        if there is None or there == here:
            continue
        if LAYERS[there] >= LAYERS[here]:
            found.append(f"{module}:{line} imports hopon.{there}")
    return found


def test_every_part_has_a_layer() -> None:
    """A new part of hopon must be given its place before it can be imported by others."""
    parts = {_name(path).split(".")[1] for path in _modules() if path != ROOT / "__init__.py"}
    assert parts <= LAYERS.keys()


def test_imports_point_down_only() -> None:
    """No part imports a part of its own layer or of one above, wherever in a file the import stands."""
    assert [text for path in _modules() for text in _violations(_name(path), path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        ("hopon.core.engine", "import hopon.serve.app", True),
        ("hopon.core.engine", "from hopon.core.types import Request", False),
        ("hopon.core.engine", "def f():\n    from hopon import model", True),
        ("hopon.model.cpu", "from hopon.serve import wire", True),
        ("hopon.model.cpu", "from hopon.native import load", False),
        ("hopon.serve.app", "import hopon.bench", True),
        ("hopon.report.page", "from hopon.core.engine import Engine", False),
        ("hopon.llm", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hopon.cli", False),
    ],
)
def test_the_layer_check_sees_violations(module: str, source: str, bad: bool) -> None:
    """The check of this file fails for upward and sideways imports and for nothing else."""
    assert bool(_violations(module, source)) is bad


def test_reports_are_made_from_records() -> None:
    """The report part imports no engine, scheduler, executor or server."""
    for path in (ROOT / "report").rglob("*.py") if (ROOT / "report").exists() else ():
        for imported, line in _imports(ast.parse(path.read_text())):
            assert _part(imported) in (None, "report", "metrics", "workload"), f"{path}:{line} imports {imported}"


def _loaded_by(statement: str) -> set[str]:
    """Top-level modules that a statement loads in a fresh interpreter without any startup files."""
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT.parent)!r})\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def _core_modules() -> list[str]:
    return [_name(path) for path in sorted((ROOT / "core").rglob("*.py"))]


def test_the_core_needs_the_standard_library_only() -> None:
    """Importing every module of the core in an interpreter without site-packages works and loads nothing else."""
    loaded = _loaded_by("\n".join(f"import {name}" for name in _core_modules()))
    assert "hopon" in loaded
    assert loaded - {"hopon"} <= sys.stdlib_module_names


def test_importing_hopon_loads_no_part() -> None:
    """``import hopon`` is quick: the public names are loaded when they are used."""
    run = subprocess.run(
        [sys.executable, "-c", "import hopon, sys; print(*[name for name in sys.modules if name.startswith('hopon')])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["hopon"]


def test_importing_the_command_line_loads_no_part_of_weight() -> None:
    """``hopon --help`` needs no numpy, no server and no tokenizer."""
    run = subprocess.run(
        [sys.executable, "-c", "import hopon.cli, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "hopon" in loaded
    assert not loaded & {"numpy", "fastapi", "pydantic", "uvicorn", "tokenizers", "huggingface_hub", "msgspec"}


def test_public_names_lead_to_their_objects() -> None:
    """Every public name can be had from ``hopon``, and an unknown one is an AttributeError."""
    for name in hopon.__all__:
        assert getattr(hopon, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        hopon.no_such_name  # noqa: B018


def _environment_reads(tree: ast.AST) -> list[int]:
    """Lines that look a variable up. Handing the whole environment on to a child process is not looking."""
    unpacked = {id(value) for node in ast.walk(tree) if isinstance(node, ast.Dict) for value in node.values}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb")
        and id(node) not in unpacked
    ]


def test_the_environment_is_read_in_the_command_line_only() -> None:
    """No module but cli/environment.py looks up an environment variable."""
    readers = [_name(path) for path in _modules() if _environment_reads(ast.parse(path.read_text()))]
    assert readers == ["hopon.cli.environment"]
