"""Answers of planners against what was measured: pure functions from cases and answers to rows of tables.

An error is the answer over the measurement, less one: below zero is under, which is what a planner must not be.
Footnotes are made of the cases in which tonnage misses; the reason of a miss stands with the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

CLOSE = 0.01
ROUNDING = 0.005
"""Logs round weights to 0.01 GiB; below by more than this is under."""
GIB = 1 << 30
OWN = "tonnage"
UNKNOWN = "not known"
Answers = Mapping[str, Mapping[str, Any]]


class Measured(Protocol):
    """What is read of a case."""

    question: Mapping[str, Any]
    weights: int | None
    allocated: int | None
    cache: float | None
    room: int | None
    ran: bool | None
    reason: str

    @property
    def log(self) -> str:
        """The name of the log."""


def error(said: float, truth: float) -> float:
    """Return how far an answer is above the truth, as a part of it; below zero for one that is under.

    >>> error(99, 100)
    -0.01
    """
    return (said - truth) / truth


def is_under(of: float) -> bool:
    """Whether an error is an answer below what was held, beyond what logs round."""
    return of < -ROUNDING


def errors_of(found: Answers, asked: Iterable[Measured], what: str, key: str) -> list[tuple[Measured, float]]:
    """Return the cases of which a figure was measured and answered, each with its error.

    Args:
        found: A peer's answers by case.
        asked: The cases.
        what: The attribute of a case that is the truth.
        key: The field of an answer that is held against it.
    """
    pairs = []
    for case in asked:
        truth, said = getattr(case, what), found.get(case.question["id"], {}).get(key)
        if truth and said is not None:
            pairs.append((case, error(said, truth)))
    return pairs


def size_columns(found: Answers, asked: Iterable[Measured], what: str, key: str | None = None) -> str:
    """Return the columns of one figure: answered, within 1 %, median and largest error, how many under, the lowest."""
    errors = [of for _, of in errors_of(found, asked, what, key or what)]
    if not errors:
        return "0 |  |  |  |  | "
    close, under = sum(abs(of) <= CLOSE for of in errors), [of for of in errors if is_under(of)]
    lowest = f"{min(under):+.1%}" if under else ""
    middle, largest = median(map(abs, errors)), max(errors, key=abs)
    return f"{len(errors)} | {close} | {middle:.2%} | {largest:+.1%} | {len(under)} | {lowest}"


def refuses(found: Answers, case: Measured) -> bool | None:
    """Whether a peer's cache of one request is more than the room there was; ``None`` if it says none."""
    need = found.get(case.question["id"], {}).get("cache")
    return None if need is None or case.room is None else bool(need > case.room)


def room_columns(found: Answers, asked: Iterable[Measured]) -> str:
    """Return the columns of the verdict on a known room: launches the engine refused, and those it ran."""
    known = [case for case in asked if case.room and case.ran is not None]
    said = {case.question["id"]: refuses(found, case) for case in known}
    refused = [said[case.question["id"]] for case in known if case.ran is False]
    ran = [said[case.question["id"]] for case in known if case.ran]
    answered = sum(one is not None for one in said.values())
    return f"{answered} of {len(known)} | {refused.count(True)} of {len(refused)} | {ran.count(True)} of {len(ran)}"


def verdict_columns(found: Answers, asked: Iterable[Measured]) -> str:
    """Return the columns of the whole verdict on launches that ran."""
    known = [found.get(case.question["id"], {}).get("fits") for case in asked if case.weights and case.ran]
    said = [one for one in known if one is not None]
    return f"{len(said)} of {len(known)} | {sum(not one for one in said)}" if said else f"0 of {len(known)} | "


def milliseconds(found: Answers) -> str:
    """Return the median time of an answer, whatever it was."""
    times = [one["seconds"] for one in found.values() if "error" not in one]
    return f"{median(times) * 1000:.1f}" if times else ""


def refusals(found: Answers, asked: Sequence[Measured]) -> str:
    """Return how many cases a peer answered with an error, and the kind most of them are of."""
    kinds = [str(one["error"]).partition(":")[0] for one in found.values() if "error" in one]
    silent = len(asked) - len(found)
    most = f", most of them {max(sorted(set(kinds)), key=kinds.count)}" if kinds else ""
    return f"{len(kinds)} of {len(asked)}{most}" + (f"; ended before {silent}" if silent else "")


def footnotes(found: Answers, asked: Sequence[Measured], what: str, key: str | None = None) -> list[str]:
    """Return a line for every case that tonnage misses: more than 1 % off, under, or the wrong verdict."""
    lines = []
    for case, of in errors_of(found, asked, what, key or what):
        wrong = what == "cache" and case.ran is not None and refuses(found, case) == case.ran
        if abs(of) > CLOSE or is_under(of) or wrong:
            truth = getattr(case, what) / GIB
            verdict = " and a wrong verdict" if wrong else ""
            lines.append(f"* `{case.log}`, {truth:.2f} GiB: {of:+.1%}{verdict}; {case.reason or UNKNOWN}.")
    return lines


def unexplained(lines: Iterable[str]) -> list[str]:
    """Return the footnotes that give no reason."""
    return [line for line in lines if line.endswith(f"; {UNKNOWN}.")]


def rows(answers: Mapping[str, Answers], columns: Callable[[Answers], str]) -> list[str]:
    """Return a row for every planner."""
    return [f"| {f'**{OWN}**' if peer == OWN else peer} | {columns(found)} |" for peer, found in answers.items()]


SIZE_HEAD = (
    "| planner | answered | within 1 % | median error | largest | under | lowest |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def tables(answers: Mapping[str, Answers], asked: Sequence[Measured], aside: Sequence[Any]) -> list[str]:
    """Return all tables as Markdown.

    Args:
        answers: By planner, by case.
        asked: Every case that was asked.
        aside: Cases of a cache that were not, with the reason.
    """
    own = answers[OWN]
    weighed = [case for case in asked if case.weights]
    cached = [case for case in asked if case.cache]
    allocated = [case for case in asked if case.allocated]
    return [
        f"### Weights per rank, {len(weighed)} logs",
        "",
        *SIZE_HEAD,
        f"| **{OWN}**, bound: what its verdict uses | {size_columns(own, weighed, 'weights', 'bound')} |",
        *rows(answers, lambda found: size_columns(found, weighed, "weights")),
        "",
        f"Where {OWN} is off by more than 1 % or under, before its bound:",
        "",
        *footnotes(own, weighed, "weights"),
        "",
        f"### Parameters of a rank as vLLM 0.32.0's classes allocate them, {len(allocated)} cases",
        "",
        *SIZE_HEAD,
        *rows(answers, lambda found: size_columns(found, allocated, "allocated", "parameters")),
        "",
        *footnotes(own, allocated, "allocated", "parameters"),
        "",
        f"### Cache of one request of the longest context, per rank, {len(cached)} logs",
        "",
        *SIZE_HEAD,
        *rows(answers, lambda found: size_columns(found, cached, "cache")),
        "",
        f"Where {OWN} is off by more than 1 % or under, or says the wrong thing of the launch:",
        "",
        *footnotes(own, cached, "cache"),
        "",
        "Not asked, because the log does not tell the size:",
        "",
        *(f"* `{case.log}`: {case.aside}." for case in aside),
        "",
        "### Does that request fit into the room the engine had",
        "",
        "| planner | answered | refused rightly | refused wrongly |",
        "| --- | ---: | ---: | ---: |",
        *rows(answers, lambda found: room_columns(found, cached)),
        "",
        "### Does one request fit on the GPU with its share of memory: launches that ran; time of an answer",
        "",
        "| planner | answered | refused wrongly | median ms | no answer |",
        "| --- | ---: | ---: | ---: | --- |",
        *rows(
            answers,
            lambda found: f"{verdict_columns(found, weighed)} | {milliseconds(found)} | {refusals(found, asked)}",
        ),
    ]
