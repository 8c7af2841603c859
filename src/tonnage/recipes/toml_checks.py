"""What every table of a recipe is checked with; a refusal names file and key."""

from __future__ import annotations

from typing import Any

from tonnage.errors import Problem, RecipeError
from tonnage.recipes.expressions import Expression, compile_expression


def expr(value: object, where: str) -> Expression | None:
    """Return an expression compiled; true and false are expressions too, nothing is none."""
    if value is None:
        return None
    return compile_expression(str(value) if not isinstance(value, bool) else repr(value), where=where)


def table(value: object, where: str) -> dict[str, Any]:
    """Return a value that must be a table."""
    if not isinstance(value, dict):
        raise bad(where, "not a table", "a table", type(value).__name__)
    return value


def list_of(value: object, where: str) -> list[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list):
        raise bad(where, "not a list", "a list", type(value).__name__)
    return value


def texts(table: dict[str, Any], where: str) -> dict[str, str]:
    """Return a table that must hold nothing but texts."""
    for key, value in table.items():
        if not isinstance(value, str):
            raise bad(f"{where}.{key}", "not a text", "a text", value)
    return table


def needs(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Refuse a table without all of these keys."""
    missing = [key for key in keys if key not in table]
    if missing:
        raise bad(where, "missing key", ", ".join(keys), "none of " + ", ".join(missing))


def only(data: dict[str, Any], allowed: frozenset[str], where: str) -> None:
    """Refuse a table with any other key."""
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise bad(where, "unknown key", ", ".join(sorted(allowed)), ", ".join(unknown))


def bad(where: str, what: str, expected: str, found: object) -> RecipeError:
    """Return the refusal of one place in a recipe."""
    return RecipeError(Problem(where=f"recipe {where}", what=what, expected=expected, found=str(found)))
