"""The functions an expression of a recipe may call, and the checks every value in one passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from tonnage.errors import Problem, RecipeError

INT_BOUND = 1 << 63

Scalar = int | bool | str | None
Apply = Callable[[Sequence[object], str], int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One callable of the expression language.

    Attributes:
        usage: How it is written, for messages.
        fewest: Smallest number of arguments.
        most: Largest number of arguments, None for any.
        apply: Takes the argument values and the place named in messages.
    """

    usage: str
    fewest: int
    most: int | None
    apply: Apply

    def accepts(self, arguments: int) -> bool:
        """Say whether it can be called with this many arguments."""
        return self.fewest <= arguments and (self.most is None or arguments <= self.most)


def refusal(place: str, what: str, *, expected: str | None = None, found: object = None) -> RecipeError:
    """Return the error for one expression, what was found shortened to a line."""
    text = None if found is None else str(found)[:200]
    return RecipeError(Problem(where=place, what=what, expected=expected, found=text))


def describe(value: object) -> str:
    """Return type and value of a single value, the type alone of anything that may be large or deep."""
    if value is None or isinstance(value, (bool, float, str)):
        return f"{type(value).__name__} {value!r:.80}"
    return f"integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def checked_int(value: object, place: str) -> int:
    """Return a value that must be an integer below 2**63 in size; true, false and floats are none.

    Raises:
        RecipeError: It is something else.
    """
    if type(value) is not int:
        raise refusal(place, "not an integer", expected="an integer", found=describe(value))
    if not -INT_BOUND < value < INT_BOUND:
        raise refusal(place, "integer out of bounds", expected="below 2**63", found=describe(value))
    return value


def _sequence(value: object, place: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise refusal(place, "not a list", expected="a list", found=describe(value))
    return value


def _ints(arguments: Sequence[object], place: str) -> list[int]:
    """Return the integers given one by one, or in one list."""
    values = _sequence(arguments[0], place) if len(arguments) == 1 else arguments
    if not values:
        raise refusal(place, "no values to choose from")
    return [checked_int(value, place) for value in values]


def _smallest(arguments: Sequence[object], place: str) -> int:
    return min(_ints(arguments, place))


def _largest(arguments: Sequence[object], place: str) -> int:
    return max(_ints(arguments, place))


def _ceil_div(arguments: Sequence[object], place: str) -> int:
    value, divisor = (checked_int(argument, place) for argument in arguments)
    if divisor <= 0:
        raise refusal(place, "divisor must be positive", found=divisor)
    return -(-value // divisor)


def _round_up(arguments: Sequence[object], place: str) -> int:
    multiple = checked_int(arguments[1], place)
    return checked_int(_ceil_div(arguments, place) * multiple, place)


def _floor_mul(arguments: Sequence[object], place: str) -> int:
    """Return a whole number times any number, rounded down; the product is taken exactly."""
    value, factor = checked_int(arguments[0], place), arguments[1]
    if isinstance(factor, float) and isfinite(factor):
        numerator, denominator = factor.as_integer_ratio()
        return checked_int(value * numerator // denominator, place)
    return checked_int(value * checked_int(factor, place), place)


def _len(arguments: Sequence[object], place: str) -> int:
    value = arguments[0]
    if not isinstance(value, (list, tuple, str, Mapping)):
        raise refusal(place, "has no length", found=describe(value))
    return len(value)


def _char(arguments: Sequence[object], place: str) -> str:
    """Return one character of a text, as layer patterns such as ``MEM*E`` need."""
    text, index = arguments[0], checked_int(arguments[1], place)
    if not isinstance(text, str) or not 0 <= index < len(text):
        raise refusal(place, "no such character", expected="a text longer than the index", found=describe(text))
    return text[index]


def _int(arguments: Sequence[object], place: str) -> int:
    """Return true and false as 1 and 0, a whole float as integer; nothing is rounded."""
    value = arguments[0]
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return checked_int(int(value), place)
    return checked_int(value, place)


def _sum(arguments: Sequence[object], place: str) -> int:
    total = 0
    for value in _sequence(arguments[0], place):
        total = checked_int(total + checked_int(value, place), place)
    return total


def _count(arguments: Sequence[object], place: str) -> int:
    value = arguments[1]
    if value is not None and not isinstance(value, (int, float, str)):
        raise refusal(place, "counts something that is no single value", found=describe(value))
    return sum(item == value for item in _sequence(arguments[0], place))


FUNCTIONS: dict[str, Function] = {
    "min": Function(usage="min(a, b, ...) or min(list)", fewest=1, most=None, apply=_smallest),
    "max": Function(usage="max(a, b, ...) or max(list)", fewest=1, most=None, apply=_largest),
    "ceil_div": Function(usage="ceil_div(a, b)", fewest=2, most=2, apply=_ceil_div),
    "round_up": Function(usage="round_up(a, multiple)", fewest=2, most=2, apply=_round_up),
    "floor_mul": Function(usage="floor_mul(a, number)", fewest=2, most=2, apply=_floor_mul),
    "char": Function(usage="char(text, index)", fewest=2, most=2, apply=_char),
    "len": Function(usage="len(list)", fewest=1, most=1, apply=_len),
    "int": Function(usage="int(value)", fewest=1, most=1, apply=_int),
    "sum": Function(usage="sum(list)", fewest=1, most=1, apply=_sum),
    "count": Function(usage="count(list, value)", fewest=2, most=2, apply=_count),
}
