"""Comparisons in expressions: single values by equality, numbers by size, membership in lists and texts.

Config fields that are floats may be compared here, and nowhere else used. Lists and mappings are not compared, because
the cost of that is the config's to choose.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from tonnage.recipes.expression_functions import describe, refusal

_EQUALITY: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ORDER: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def comparator(operation: ast.cmpop, operand: ast.expr, place: str) -> Callable[[object, object], bool]:
    """Return the test of one comparison operator, whose right side is ``operand``.

    Raises:
        RecipeError: ``is`` with anything but None; the returned test raises for values it cannot compare.
    """
    if (equal := _EQUALITY.get(type(operation))) is not None:
        is_none = isinstance(operand, ast.Constant) and operand.value is None
        if isinstance(operation, ast.Is | ast.IsNot) and not is_none:
            raise refusal(place, "`is` compares with None only", found=ast.unparse(operand))
        return lambda left, right: equal(_scalar(left, place), _scalar(right, place))
    if (ordered := _ORDER.get(type(operation))) is not None:
        return lambda left, right: ordered(*_comparable(left, right, place))
    wanted = isinstance(operation, ast.In)
    return lambda left, right: _contains(right, left, place) is wanted


def _scalar(value: object, place: str) -> object:
    if value is None or isinstance(value, (int, float, str)):
        return value
    raise refusal(place, "compares something that is no single value", found=describe(value))


def _comparable(left: object, right: object, place: str) -> tuple[float, float]:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left, right
    found = f"{describe(left)} and {describe(right)}"
    raise refusal(place, "compares the size of something that is no number", found=found)


def _contains(container: object, value: object, place: str) -> bool:
    if isinstance(container, (list, tuple)):
        return _scalar(value, place) in container
    if isinstance(container, str) and isinstance(value, str):
        return value in container
    found = f"{describe(value)} in {describe(container)}"
    raise refusal(place, "`in` needs a list, or a text in a text", found=found)
