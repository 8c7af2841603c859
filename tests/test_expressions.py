"""What a recipe's expressions mean, and what they refuse."""

from __future__ import annotations

import pytest

from tonnage.errors import RecipeError
from tonnage.recipes.expressions import compile_expression

CONFIG: dict[str, object] = {
    "hidden_size": 7168,
    "num_attention_heads": 96,
    "num_key_value_heads": None,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 0.5,
    "model_type": "kimi_k3",
    "linear_attn_config": {"num_heads": 96, "kda_layers": [1, 2, 3, 5], "short_conv": {"kernel": 4}},
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "mlp_widths": [64, 128, 256],
    "enormous": 1 << 63,
    "i": 2,
}

VALUES: dict[str, object] = {
    "hidden_size": 7168,
    "hidden_size * 2 + 1": 14_337,
    "hidden_size // num_attention_heads": 74,
    "hidden_size % num_attention_heads": 64,
    "-hidden_size // 3": -2390,
    "--7": 7,
    "linear_attn_config.num_heads": 96,
    "linear_attn_config.short_conv.kernel": 4,
    "linear_attn_config['num_heads']": 96,
    "mlp_widths[0]": 64,
    "mlp_widths[i]": 256,
    "mlp_widths[-1]": 256,
    "layer_types[i]": "linear_attention",
    "layer_types[i] == 'linear_attention'": True,
    "linear_attn_config.kda_layers[i + 1]": 5,
    "i in linear_attn_config.kda_layers": True,
    "4 not in linear_attn_config.kda_layers": True,
    "model_type in ('kimi_k3', 'kimi_k31')": True,
    "model_type not in ['llama']": True,
    "'kimi' in model_type": True,
    "get(num_key_value_heads, num_attention_heads)": 96,
    "get(head_dim, hidden_size // 64)": 112,
    "get(linear_attn_config.absent.deeper, 3)": 3,
    "get(mlp_widths[3], 1)": 1,
    "get(tie_word_embeddings, True)": False,
    "has(head_dim)": False,
    "has(num_key_value_heads)": False,
    "has(linear_attn_config.num_heads)": True,
    "has(linear_attn_config.nothing)": False,
    "num_key_value_heads is None": True,
    "hidden_size is not None": True,
    "num_key_value_heads == None": True,
    "num_key_value_heads": None,
    "num_key_value_heads or num_attention_heads": 96,
    "attention_bias and i": 2,
    "attention_bias and not tie_word_embeddings": True,
    "0 < i <= 2 < hidden_size": True,
    "0 < i > 2": False,
    "rope_theta > 10000": True,
    "partial_rotary_factor == 0": False,
    "int(rope_theta)": 1_000_000,
    "int(attention_bias)": 1,
    "1 if tie_word_embeddings else 2": 2,
    "hidden_size if has(hidden_size) else missing": 7168,
    "min(hidden_size, 3, 12)": 3,
    "max(mlp_widths)": 256,
    "sum(mlp_widths)": 448,
    "sum([])": 0,
    "len(layer_types)": 3,
    "len(linear_attn_config)": 3,
    "count(layer_types, 'linear_attention')": 2,
    "ceil_div(7, 2)": 4,
    "ceil_div(-7, 2)": -3,
    "round_up(163_841, 64)": 163_904,
    "round_up(128, 64)": 128,
    "floor_mul(hidden_size + 1, partial_rotary_factor)": 3584,
    "floor_mul(2, hidden_size)": 14_336,
    "char(model_type, 5)": "k",
    "9223372036854775807": (1 << 63) - 1,
    "None": None,
    "'text'": "text",
    "  1 + 1 ": 2,
}


@pytest.mark.parametrize("text", VALUES)
def test_value(text: str) -> None:
    value = compile_expression(text, where="test").evaluate(CONFIG)
    assert (value, type(value)) == (VALUES[text], type(VALUES[text]))


REFUSED_WHEN_COMPILED = {
    "__import__('os').system('true')": "only plain calls",
    "().__class__.__bases__": "name not allowed",
    "hidden_size.__class__": "name not allowed",
    "__builtins__": "name not allowed",
    "get(__class__, 1)": "name not allowed",
    "2 ** 1000000000": "operator not allowed",
    "hidden_size / 2": "operator not allowed",
    "1 << 62": "operator not allowed",
    "1 | 2": "operator not allowed",
    "a @ b": "operator not allowed",
    "~1": "not allowed",
    "+1": "not allowed",
    "1.5": "not an integer",
    "1j": "not an integer",
    "b'x'": "not an integer",
    "...": "not an integer",
    "9223372036854775808": "out of bounds",
    "1" * 500: "out of bounds",
    "lambda: 1": "not allowed",
    "(lambda: 1)()": "only plain calls",
    "[x for x in y]": "not allowed",
    "sum(x for x in y)": "not allowed",
    "{1: 2}": "not allowed",
    "{1, 2}": "not allowed",
    "f'{x}'": "not allowed",
    "(x := 1)": "not allowed",
    "x[1:2]": "not allowed",
    "[*x]": "not allowed",
    "max(*x)": "not allowed",
    "max(a, key=b)": "only plain calls",
    "model_type.upper()": "only plain calls",
    "max(1)(2)": "only plain calls",
    "eval('1')": "unknown function",
    "open('x')": "unknown function",
    "abs(1)": "unknown function",
    "len()": "wrong number of arguments",
    "ceil_div(1)": "wrong number of arguments",
    "has(a, b)": "wrong number of arguments",
    "get(a)": "wrong number of arguments",
    "has(1)": "only a config field",
    "has(max(1, 2))": "only a config field",
    "'abc'[0]": "only a config field",
    "(a if b else c).d": "only a config field",
    "[1, 2][0]": "only a config field",
    "a is b": "compares with None only",
    "": "not an expression",
    "1 +": "not an expression",
    "x = 1": "not an expression",
    "import os": "not an expression",
    "1; 2": "not an expression",
    "a\nb": "not an expression",
    "'\0'": "not an expression",
    "'\\x41'": "backslash",
    "(" * 400 + "1" + ")" * 400: "not an expression",
    "-" * 900 + "1": "too deep",
    "not " * 200 + "a": "too deep",
    "+".join(["1"] * 400): "too deep",
    "a" + ".b" * 400: "too deep",
    "a" + "[0]" * 300: "too deep",
    "1" + " " * 1000: "too long",
}


@pytest.mark.parametrize("text", REFUSED_WHEN_COMPILED, ids=lambda text: text[:40].replace("\0", "NUL"))
def test_hostile_expression_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compile_expression(text, where="llama.toml: shape")
    line = str(caught.value)
    assert REFUSED_WHEN_COMPILED[text] in line
    assert line.startswith("llama.toml: shape")
    assert len(line.splitlines()) == 1


REFUSED_WHEN_EVALUATED = {
    "missing": "config field is missing; expected missing",
    "linear_attn_config.head_dim": "config field is missing; expected linear_attn_config.head_dim",
    "mlp_widths[7]": "config field is missing; expected mlp_widths[7]",
    "mlp_widths[True]": "config field is missing",
    "model_type[0]": "config field is missing",
    "hidden_size.bits": "config field is missing",
    "get(head_dim, missing)": "config field is missing; expected missing",
    "rope_theta * 2": "not an integer; expected an integer; found float 1000000.0",
    "rope_theta": "not an integer",
    "attention_bias + 1": "not an integer; expected an integer; found bool True",
    "-attention_bias": "not an integer",
    "model_type * 1000000000": "not an integer",
    "model_type + model_type": "not an integer",
    "model_type % 1": "not an integer",
    "mlp_widths * 1000000000": "not an integer",
    "mlp_widths + mlp_widths": "not an integer",
    "num_key_value_heads + 1": "not an integer",
    "mlp_widths": "not an integer",
    "linear_attn_config": "not an integer",
    "int(partial_rotary_factor)": "not an integer",
    "int(model_type)": "not an integer",
    "enormous": "out of bounds",
    "enormous - enormous": "out of bounds",
    "9223372036854775807 + 1": "out of bounds",
    "4294967296 * 4294967296": "out of bounds",
    "sum([9223372036854775807, 1])": "out of bounds",
    "round_up(9223372036854775807, 2)": "out of bounds",
    "1 // 0": "division by zero; found 0",
    "1 % (i - 2)": "division by zero; found i - 2",
    "ceil_div(1, 0)": "divisor must be positive",
    "round_up(1, -1)": "divisor must be positive",
    "max([])": "no values",
    "max(hidden_size)": "not a list",
    "sum(model_type)": "not a list",
    "count(model_type, 'k')": "not a list",
    "char(model_type, 7)": "no such character",
    "char(layer_types, 0)": "no such character",
    "floor_mul(2, model_type)": "not an integer",
    "count(layer_types, layer_types)": "no single value",
    "len(7)": "has no length",
    "1 in 7": "`in` needs a list",
    "1 in model_type": "`in` needs a list",
    "mlp_widths in [1]": "no single value",
    "mlp_widths == mlp_widths": "no single value",
    "'a' < 1": "no number",
    "num_key_value_heads < 1": "no number",
}


@pytest.mark.parametrize("text", REFUSED_WHEN_EVALUATED)
def test_value_that_cannot_be_is_refused_in_one_line(text: str) -> None:
    expression = compile_expression(text, where="kimi.toml")
    with pytest.raises(RecipeError) as caught:
        expression.evaluate(CONFIG)
    line = str(caught.value)
    assert REFUSED_WHEN_EVALUATED[text] in line
    assert f"kimi.toml: `{text}`: " in line
    assert len(line.splitlines()) == 1


def test_typed_results() -> None:
    assert compile_expression("hidden_size", where="t").evaluate_int(CONFIG) == 7168
    assert compile_expression("has(hidden_size)", where="t").evaluate_bool(CONFIG) is True
    for text in ("attention_bias", "model_type", "num_key_value_heads"):
        with pytest.raises(RecipeError, match="not an integer"):
            compile_expression(text, where="t").evaluate_int(CONFIG)
    for text in ("i", "num_key_value_heads"):
        with pytest.raises(RecipeError, match="not a condition; expected true or false"):
            compile_expression(text, where="t").evaluate_bool(CONFIG)


def test_names_are_the_config_fields_and_not_the_functions() -> None:
    text = "max(a.b, get(c, d)) + e[f] if has(g.h) else len"
    assert compile_expression(text, where="t").names == {"a", "c", "d", "e", "f", "g", "len"}


def test_same_text_compiles_once_and_compares_by_text() -> None:
    first = compile_expression("a + 1", where="t")
    assert compile_expression("a + 1", where="t") is first
    assert len({first, compile_expression("a + 1", where="u")}) == 2


def test_a_field_named_like_a_function_can_be_read() -> None:
    assert compile_expression("max + max(max, 2)", where="t").evaluate({"max": 5}) == 10


def test_deeply_nested_config_costs_nothing_and_prints_short() -> None:
    deep: object = 1
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(RecipeError, match="found list"):
        compile_expression("deep + 1", where="t").evaluate({"deep": deep})
    with pytest.raises(RecipeError, match="no single value"):
        compile_expression("deep == deep", where="t").evaluate({"deep": deep})
