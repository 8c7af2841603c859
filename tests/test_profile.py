"""Serving profiles as they are written: ``c4-p4096``."""

from __future__ import annotations

import pytest

from tonnage.errors import UnitError
from tonnage.profile import Profile, parse_profile


def test_profile_says_concurrency_and_prefill_chunk() -> None:
    profile = parse_profile("c4-p4096", context_tokens=262_144, kv_dtype="fp8")
    assert profile == Profile(
        name="c4-p4096", concurrency=4, prefill_chunk_tokens=4096, context_tokens=262_144, kv_dtype="fp8"
    )


def test_upper_case_is_the_same_profile() -> None:
    assert parse_profile("C4-P4096") == parse_profile("c4-p4096")


def test_profile_that_was_not_asked_for_says_nothing() -> None:
    assert parse_profile(None) == Profile()
    assert parse_profile(None, context_tokens=4096).context_tokens == 4096


def test_largest_profile() -> None:
    profile = parse_profile("c9999999-p999999999")
    assert (profile.concurrency, profile.prefill_chunk_tokens) == (9_999_999, 999_999_999)


REFUSED = ["", "c4", "p4096", "c0-p4096", "c4-p0", "c04-p4096", "c4-p4096-k7", "c-4-p1", "c4 p4096", "c4_p4096", "c٤-p4096", "c10000000-p1", "c1-p1000000000", "c4-p4096\n"]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_text_that_is_no_profile_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_profile(text)
    assert str(caught.value).startswith("--profile: not a profile; expected cC-pP such as c4-p4096; found ")
    assert "\n" not in str(caught.value)
