"""Stages of a plan are integer arithmetic on values: no division, no float, no way to touch the world."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tonnage

ROOT = Path(tonnage.__file__).parent
PURE = sorted(
    path
    for pattern in (
        "formats/*.py", "engines/*.py", "recipes/blueprint.py", "recipes/modules.py", "recipes/expression*.py", "recipes/schema.py",
        "cuts.py", "shares.py", "placement.py", "placed_weights.py", "plan.py", "plan_notes.py", "request.py", "credit.py", "credit_plan.py", "topology.py", "assignment.py", "matching.py",
        "explain.py", "serve/outcome.py", "serve/parts.py", "serve/words.py", "measure/classes.py", "measure/packages.py", "measure/record.py",
        "recognition.py", "container.py", "inspection.py", "profile.py", "errors.py",
        "memory/cache*.py", "memory/term*.py", "memory/workspace*.py", "memory/runtime*.py", "model_shape.py", "fit_terms.py", "term_evidence.py",
        "observe/[!_i]*.py", "flags/*.py", "memory/budget*.py", "memory/devices.py", "checkpoint/quant.py", "checkpoint/config.py", "checkpoint/recognise.py", "checkpoint/tally.py", "checkpoint/name_*.py",
        "report/bars.py", "report/changes.py", "report/growth.py", "report/picture.py", "report/saved.py", "report/svg.py", "saved_plan.py",
    )
    for path in ROOT.glob(pattern)
)  # fmt: skip
WORLD = {
    "asyncio", "concurrent", "ctypes", "datetime", "http", "importlib", "io", "locale", "logging", "mmap", "multiprocessing",
    "numpy", "os", "pathlib", "pickle", "platform", "random", "requests", "rich", "secrets", "shutil", "signal", "socket",
    "subprocess", "sys", "tempfile", "threading", "time", "torch", "typer", "urllib", "uuid",
}  # fmt: skip
CALLS = {"open", "eval", "exec", "compile", "__import__", "input", "print", "float", "round", "globals", "setattr"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node


def test_the_walk_sees_the_stages() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in PURE}
    assert {"placement.py", "cuts.py", "plan.py", "credit.py", "formats/storage.py", "engines/vllm.py"} <= names
    assert len(names) >= 30


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stage_divides_by_floor_only(path: Path) -> None:
    found = [
        where(path, node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div)
    ]
    assert not found


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stage_has_no_float_literal(path: Path) -> None:
    found = [
        where(path, node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, float | complex)
    ]
    assert not found


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stage_imports_nothing_of_the_world(path: Path) -> None:
    found = [f"{where(path, node)} {name}" for name, node in imports(tree(path)) if name in WORLD]
    assert not found


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stage_calls_nothing_that_reads_prints_rounds_or_executes(path: Path) -> None:
    found = [
        f"{where(path, node)} {node.func.id}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
    ]
    assert not found


def test_nothing_of_the_package_evaluates_text_or_catches_everything() -> None:
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(tree(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in ("eval", "exec", "__import__"):
                found.append(where(path, node))
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.unparse(node.type).strip("()").split(", ") if node.type else ["everything"]
                found += [where(path, node) for kind in kinds if kind in ("everything", "Exception")]
    assert not found
