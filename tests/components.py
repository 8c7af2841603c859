"""The components of ledger lines, read out of the code: whatever makes a line, by the name it gives it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "tonnage"
MAKERS = {
    "Extra": None,
    "Held": None,
    "LedgerLine": None,
    "Term": None,
    "calibrated": 0,
    "exact_line": 0,
    "exact_term": 0,
    "replace": None,
}
"""What makes a line, and the position of the name where it is no keyword."""
PASSED_ON = frozenset({"component", "extra.component", "h.component", "line.component"})
"""Names that come from what already has one."""
OTHER_LEDGERS = frozenset({"explain.py", "prepare/run.py"})
"""Here lines of records are renamed and none is made, or something else is called by such a name."""


@cache
def components() -> dict[str, set[str]]:
    """Return every component with the files that make it; what a name is made of stands in it in capitals.

    Raises:
        ValueError: A name is not written where this can read it.
    """
    trees = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    constants = {name: dict(_constants(tree)) for name, tree in trees.items()}
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        if name in OTHER_LEDGERS:
            continue
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (node := _name_in(call)) is not None:
                said = ast.unparse(node)
                component = _text(node) or constants[name].get(said)
                if component is None and said not in PASSED_ON:
                    raise ValueError(f"{name}:{call.lineno}: {said}")
                if component is not None:
                    found[component].add(name)
    return dict(found)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the texts a module gives names to."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = zip(_parts(target), _parts(node.value), strict=False)
                yield from (
                    (one.id, text) for one, value in pairs if isinstance(one, ast.Name) and (text := _text(value))
                )


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _name_in(call: ast.Call) -> ast.expr | None:
    """Return what a call gives as a component; ``None`` if it makes no line."""
    if not isinstance(call.func, ast.Name) or call.func.id not in MAKERS:
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "component"), None)
    at = MAKERS[call.func.id]
    return named if named is not None or at is None else call.args[at]


def _text(node: ast.expr) -> str | None:
    """Return a text, with the names in it in capitals; ``None`` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value.id.upper() if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) else
            str(getattr(part, "value", "")) for part in node.values
        )  # fmt: skip
    return None
