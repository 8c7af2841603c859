"""Expressions agree with Python's own arithmetic wherever they answer at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import RecipeError
from tonnage.recipes.expressions import compile_expression

BOUND = 1 << 63
NAMES = ("a", "b", "c")

leaves = st.one_of(st.integers(0, BOUND - 1).map(str), st.sampled_from(NAMES))


def _nest(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner)
    compare = st.tuples(inner, st.sampled_from(["<", "<=", "==", "!=", ">", ">="]), inner)
    choice = st.tuples(inner, compare, inner)
    return st.one_of(
        binary.map(lambda parts: "({} {} {})".format(*parts)),
        inner.map(lambda text: f"(-{text})"),
        choice.map(lambda parts: "({} if {} else {})".format(parts[0], " ".join(parts[1]), parts[2])),
        st.tuples(inner, inner).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
    )


expressions = st.recursive(leaves, _nest, max_leaves=12).filter(lambda text: len(text) <= 1000)
values = st.fixed_dictionaries({name: st.integers(-1000, 1000) for name in NAMES})


@given(text=expressions, names=values)
def test_result_is_pythons_or_a_refusal(text: str, names: dict[str, int]) -> None:
    try:
        expected = eval(text, {"__builtins__": {}, "max": max}, dict(names))  # noqa: S307 - our own grammar: the oracle
    except ZeroDivisionError:
        expected = None
    try:
        found = compile_expression(text, where="law").evaluate_int(names)
    except RecipeError as error:
        assert expected is None or "out of bounds" in str(error)  # noqa: PT017 - which refusal is the law
        return
    assert found == expected
    assert -BOUND < found < BOUND


@given(text=st.text(max_size=60), names=values)
def test_any_text_is_a_value_or_a_recipe_error(text: str, names: dict[str, int]) -> None:
    try:
        compile_expression(text, where="law").evaluate(names)
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - one line is the law


@given(
    text=st.text(alphabet="abc019.[]()+-*/%<>=!'\", innotrifelse", max_size=40),
    names=values,
)
def test_text_of_our_alphabet_is_a_value_or_a_recipe_error(text: str, names: dict[str, int]) -> None:
    try:
        compile_expression(text, where="law").evaluate(names)
    except RecipeError:
        return
