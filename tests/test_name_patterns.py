"""Patterns from a stranger's config: they mean what they mean to ``re``, and take bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tonnage.checkpoint.name_patterns import BadPatternError, compile_name_pattern

NAME = "language_model.model.layers.17.mlp.experts.0.gate_proj"

MATCHES = {
    ".*self_attn.*": False,
    ".*experts.*": True,
    r".*mlp\.(gate|up|gate_up|down)_proj.*": False,
    r".*mlp\.experts\.\d+\.(gate|up|down)_proj$": True,
    r"language_model\.model\.layers\.(0|1[0-9])\..*": True,
    r"language_model\.model\.layers\.([0-9]|1[0-6])\..*": False,
    "language_model": True,  # matched from the start, not whole
    "model": False,
    "language_model$": False,
    "^language_model": True,
    r"(?!.*experts).*proj": False,
    r"(?=.*experts)(?!.*shared).*proj": True,
    r"[^.]+\.[^.]+\.layers": True,
    r"\w+\.\w+\.\w{6}\.\d{2}\.": True,
    r"\w+\.\w+\.\w{6}\.\d{3}\.": False,
    "": True,
    "nothing|language": True,
    "(?:)": True,
    ".*?proj": True,
}


@pytest.mark.parametrize(("pattern", "expected"), MATCHES.items(), ids=MATCHES)
def test_pattern_of_a_config_matches_the_names_it_should(pattern: str, expected: bool) -> None:
    assert compile_name_pattern(pattern).matches(NAME) is expected
    assert (re.match(pattern, NAME) is not None) is expected


RUNAWAYS = [
    "(.|..)+X",
    "(.|.)*!",
    ".*" * 12 + "X",
    r"(?:.|\w)+#",
    "(.?){60}X",
    "(a|b|ab)*c",
    "([a-z.]+)*X",
    "(.*)*X",
    "(.*.*)X",
]


@pytest.mark.parametrize("pattern", RUNAWAYS)
def test_pattern_that_keeps_a_backtracking_engine_busy_for_ages_is_answered_at_once(pattern: str) -> None:
    began = time.process_time()
    compiled = compile_name_pattern(pattern)
    assert not any(compiled.matches(NAME + "." * i) for i in range(20))
    assert time.process_time() - began < 20


REFUSED = {
    "((a*)*)*": "nested repetition is too costly",
    "((.{1,30}){1,30}){1,30}": "nested repetition is too costly",
    "(a{1000}){1000}": "nested repetition is too costly",
    "(?=(.|..)*X)(?=(.|..)*X)": "nested repetition is too costly",
    "a" * 513: "longer than 512 characters",
    "(" * 17 + ")" * 17: "groups nest deeper than 16",
    "(": "unbalanced (",
    ")": "unbalanced )",
    "a)b": "unbalanced )",
    "[": "unbalanced [",
    "[]": "unbalanced [",
    "*": "unexpected *",
    "a**": "repeated repetition",
    "a*+": "repeated repetition",
    "a{2}{3}": "repeated repetition",
    "^*": "nothing to repeat",
    "(?=a)*": "nothing to repeat",
    "a{3,2}": "not a repetition",
    "a{1001}": "not a repetition",
    "a{,}": "not a repetition",
    "a{x}": "not a repetition",
    "{": "unexpected {",
    "\\": "unknown escape",
    r"\1": "unknown escape \\1",
    r"\b": "unknown escape \\b",
    r"[\1]": "unknown escape \\1",
    "[z-a]": "not a range",
    r"[a-\d]": "not a range",
    "(?P<a>x)": "unknown group (?P",
    "(?i)x": "unknown group (?i",
    "(?<=a)b": "unknown group (?<",
    "(?": "unknown group (?",
}


@pytest.mark.parametrize(("pattern", "reason"), REFUSED.items(), ids=range(len(REFUSED)))
def test_pattern_outside_the_language_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(BadPatternError) as caught:
        compile_name_pattern(pattern)
    assert reason in str(caught.value)


atoms = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", r"\S", "[a-c.]", "[]a]", "[a-]", "0"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("".join, st.lists(inner, max_size=3)),
        st.builds("({}|{})".format, inner, inner),
        st.builds(
            "(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "{,2}", "*?", "+?", "??"])
        ),
        st.builds("(?{}{})".format, st.sampled_from("=!"), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(patterns, st.sampled_from(["", "$", "^"]), st.text("abc.0_", max_size=8))
def test_pattern_means_what_it_means_to_re(pattern: str, anchor: str, name: str) -> None:
    pattern = f"^{pattern}" if anchor == "^" else pattern + anchor
    try:
        compiled = compile_name_pattern(pattern)
    except BadPatternError:
        assume(False)
    assert compiled.matches(name) is (re.match(pattern, name) is not None)


@settings(deadline=None)
@given(st.text(r"ab.*+?()[]{}|\^$-0,12dw=!:", max_size=30))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    try:
        compiled = compile_name_pattern(text)
    except BadPatternError:
        return
    compiled.matches(NAME)
