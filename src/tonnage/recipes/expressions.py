"""Expressions over config fields, as recipes write them: ``num_attention_heads * get(head_dim, 64)``.

A recipe is data, and so may come from a stranger. An expression is parsed once, every node is held against an
allow-list, and the result is a nest of closures: nothing is ever handed to the interpreter. All arithmetic is on
integers below 2**63, text is never joined or repeated, so that no config can make an expression costly.

Grammar: Python's, reduced to integers, texts, ``True``, ``False`` and ``None``; config fields with ``.name`` and
``[index]``; ``+ - * // %``; comparisons including ``in`` and ``is None``; ``and``, ``or``, ``not``; ``a if c else b``;
lists and tuples to look things up in; and the calls ``has(field)`` and ``get(field, default)``, for which a field that
is null counts as missing, and those of ``expression_functions``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tonnage.recipes.expression_comparisons import comparator
from tonnage.recipes.expression_functions import FUNCTIONS, Scalar, checked_int, describe, refusal

LONGEST_EXPRESSION = 1_000
DEEPEST_EXPRESSION = 60

Names = Mapping[str, object]
Evaluator = Callable[[Names], object]

_LONGEST_SHOWN = 120
_ABSENT = object()
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One compiled expression.

    Attributes:
        text: The expression as written.
        where: Recipe and key it was written in, for messages.
        names: Config fields it looks up, first name of each path; those inside ``has`` and ``get`` included.
    """

    text: str
    where: str
    names: frozenset[str]
    _run: Evaluator = field(repr=False, compare=False)

    def evaluate(self, names: Names) -> Scalar:
        """Return the value for these config fields.

        Raises:
            RecipeError: A field is missing, or has a type or size the operation does not accept.
        """
        value = self._run(names)
        if value is None or isinstance(value, (bool, str)):
            return value
        return checked_int(value, self._place)

    def evaluate_int(self, names: Names) -> int:
        """Return the value, which must be an integer below 2**63 (true and false are none).

        Raises:
            RecipeError: As ``evaluate``, or the value is no integer.
        """
        return checked_int(self._run(names), self._place)

    def evaluate_bool(self, names: Names) -> bool:
        """Return the value, which must be true or false.

        Raises:
            RecipeError: As ``evaluate``, or the value is neither.
        """
        value = self._run(names)
        if not isinstance(value, bool):
            raise refusal(self._place, "not a condition", expected="true or false", found=describe(value))
        return value

    @property
    def _place(self) -> str:
        return _place(self.where, self.text)


@lru_cache(maxsize=8192)
def compile_expression(text: str, *, where: str) -> Expression:
    """Return the expression compiled, so that evaluating it costs a few calls.

    Args:
        text: The expression, at most 1000 characters and 60 levels deep.
        where: Recipe and key it stands in, for messages.

    Raises:
        RecipeError: It is no expression, or uses something outside the allow-list.
    """
    place = _place(where, text)
    if len(text) > LONGEST_EXPRESSION:
        longest = f"at most {LONGEST_EXPRESSION} characters"
        raise refusal(where, "expression too long", expected=longest, found=len(text))
    if "\\" in text:
        raise refusal(place, "backslash in an expression")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refusal(place, "not an expression", found=str(error)) from error
    run = _compile(tree.body, place, DEEPEST_EXPRESSION)
    return Expression(text=text, where=where, names=frozenset(_free_names(tree)), _run=run)


def _place(where: str, text: str) -> str:
    shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
    return f"{where}: `{shown}`"


def _free_names(tree: ast.Expression) -> Iterator[str]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in called:
            yield node.id


def _compile(node: ast.expr, place: str, depth: int) -> Evaluator:  # noqa: C901, PLR0911 - one case per kind of node
    """Return the closure of one node; ``depth`` is how many levels may still follow."""
    if depth <= 0:
        raise refusal(place, "expression too deep", expected=f"at most {DEEPEST_EXPRESSION} levels")
    match node:
        case ast.Constant():
            return _constant(node, place)
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _lookup(node, place, depth)
        case ast.UnaryOp():
            return _unary(node, place, depth)
        case ast.BinOp():
            return _arithmetic(node, place, depth)
        case ast.BoolOp():
            return _boolean(node, place, depth)
        case ast.Compare():
            return _comparison(node, place, depth)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, first, second = (_compile(part, place, depth - 1) for part in (test, body, orelse))
            return lambda names: first(names) if condition(names) else second(names)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            items = [_compile(element, place, depth - 1) for element in elements]
            return lambda names: tuple(item(names) for item in items)
        case ast.Call():
            return _call(node, place, depth)
    raise refusal(place, "not allowed in an expression", found=type(node).__name__)


def _constant(node: ast.Constant, place: str) -> Evaluator:
    value = node.value
    if value is not None and not isinstance(value, (bool, str)):
        value = checked_int(value, place)
    return lambda _: value


def _unary(node: ast.UnaryOp, place: str, depth: int) -> Evaluator:
    operand = _compile(node.operand, place, depth - 1)
    if isinstance(node.op, ast.Not):
        return lambda names: not operand(names)
    if isinstance(node.op, ast.USub):
        return lambda names: -checked_int(operand(names), place)
    raise refusal(place, "not allowed in an expression", found=type(node.op).__name__)


def _arithmetic(node: ast.BinOp, place: str, depth: int) -> Evaluator:
    apply = _ARITHMETIC.get(type(node.op))
    if apply is None:
        raise refusal(place, "operator not allowed", expected="+ - * // %", found=type(node.op).__name__)
    left = _compile(node.left, place, depth - 1)
    right = _compile(node.right, place, depth - 1)
    divides = isinstance(node.op, ast.FloorDiv | ast.Mod)

    def run(names: Names) -> int:
        first, second = checked_int(left(names), place), checked_int(right(names), place)
        if divides and not second:
            raise refusal(place, "division by zero", found=ast.unparse(node.right))
        return checked_int(apply(first, second), place)

    return run


def _boolean(node: ast.BoolOp, place: str, depth: int) -> Evaluator:
    *others, last = [_compile(value, place, depth - 1) for value in node.values]
    stop_at = isinstance(node.op, ast.Or)

    def run(names: Names) -> object:
        for operand in others:
            value = operand(names)
            if bool(value) is stop_at:
                return value
        return last(names)

    return run


def _comparison(node: ast.Compare, place: str, depth: int) -> Evaluator:
    first = _compile(node.left, place, depth - 1)
    steps = [
        (comparator(operation, operand, place), _compile(operand, place, depth - 1))
        for operation, operand in zip(node.ops, node.comparators, strict=True)
    ]

    def run(names: Names) -> bool:
        left = first(names)
        for holds, operand in steps:
            right = operand(names)
            if not holds(left, right):
                return False
            left = right
        return True

    return run


def _lookup(node: ast.expr, place: str, depth: int) -> Evaluator:
    find = _path(node, place, depth)
    path = ast.unparse(node)

    def run(names: Names) -> object:
        value = find(names)
        if value is _ABSENT:
            raise refusal(place, "config field is missing", expected=path)
        return value

    return run


def _path(node: ast.expr, place: str, depth: int) -> Evaluator:
    """Return the closure that finds a config field such as ``a.b[0]``, or ``_ABSENT``."""
    if depth <= 0:
        raise refusal(place, "expression too deep", expected=f"at most {DEEPEST_EXPRESSION} levels")
    match node:
        case ast.Name(id=name):
            _refuse_dunder(name, place)
            return lambda names: names.get(name, _ABSENT)
        case ast.Attribute(value=parent, attr=name):
            _refuse_dunder(name, place)
            find = _path(parent, place, depth - 1)
            return lambda names: _member(find(names), name)
        case ast.Subscript(value=parent, slice=index):
            find = _path(parent, place, depth - 1)
            key = _compile(index, place, depth - 1)
            return lambda names: _member(find(names), key(names))
    raise refusal(place, "only a config field can stand here", found=ast.unparse(node))


def _refuse_dunder(name: str, place: str) -> None:
    if name.startswith("__"):
        raise refusal(place, "name not allowed in an expression", found=name)


def _member(value: object, key: object) -> object:
    if isinstance(value, Mapping) and type(key) is str:
        return value.get(key, _ABSENT)
    if isinstance(value, (list, tuple)) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return _ABSENT


def _call(node: ast.Call, place: str, depth: int) -> Evaluator:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise refusal(place, "only plain calls of the allowed functions", found=ast.unparse(node))
    name = node.func.id
    if name in {"has", "get"}:
        return _field_call(name, node.args, place, depth)
    function = FUNCTIONS.get(name)
    if function is None:
        raise refusal(place, "unknown function", expected=", ".join(("has", "get", *FUNCTIONS)), found=name)
    if not function.accepts(len(node.args)):
        raise refusal(place, f"wrong number of arguments for {name}", expected=function.usage, found=len(node.args))
    arguments = [_compile(argument, place, depth - 1) for argument in node.args]
    apply = function.apply
    return lambda names: apply([argument(names) for argument in arguments], place)


def _field_call(name: str, arguments: Sequence[ast.expr], place: str, depth: int) -> Evaluator:
    usage = {"has": "has(field)", "get": "get(field, default)"}[name]
    if len(arguments) != usage.count(",") + 1:
        raise refusal(place, f"wrong number of arguments for {name}", expected=usage, found=len(arguments))
    find = _path(arguments[0], place, depth - 1)
    if name == "has":
        return lambda names: find(names) not in (_ABSENT, None)
    default = _compile(arguments[1], place, depth - 1)

    def run(names: Names) -> object:
        value = find(names)
        return default(names) if value is _ABSENT or value is None else value

    return run
