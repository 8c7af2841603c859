"""Tables of comparisons: what of two models differs, the worst tensors, and what that does to the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tonnage.errors import one_line
from tonnage.report.tables import add_row, new_table
from tonnage.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from tonnage.compare.answers import EndToEnd
    from tonnage.compare.comparison import Comparison
    from tonnage.compare.figures import Sums, TensorError
    from tonnage.compare.pairs import Tensor

_MOST_SHOWN = 20


def comparison_table(comparison: Comparison, end_to_end: EndToEnd | None = None) -> RenderableType:
    """Return counts, the tensors that differ most, what only one side has, and the figures end to end."""
    a, b = (
        f"{name} ({counted(count, 'rank')})" for name, count in zip(comparison.names, comparison.ranks, strict=True)
    )
    parts: list[RenderableType] = [Text(one_line(f"A {a} · B {b}"), style="bold"), Text(_counts(comparison))]
    if comparison.differing:
        parts.append(_errors(comparison))
    for side, tensors in (("A", comparison.only_a), ("B", comparison.only_b)):
        if tensors:
            parts.append(Text(_names(f"only in {side}", tensors)))
    if comparison.incomparable:
        parts.append(Text(_names("stored in two ways, not compared", [a for a, _ in comparison.incomparable])))
    if end_to_end is not None:
        parts += _answers(end_to_end)
    return Group(*parts)


def _counts(comparison: Comparison) -> str:
    compared, differing = len(comparison.errors), len(comparison.differing)
    if not differing:
        return f"{counted(compared, 'tensor')} of both, none differs"
    text = f"{counted(compared, 'tensor')} of both, {differing:,} differ"
    total = comparison.total
    if total.elements:
        text += f": relative error {_ratio(total.relative)}, SQNR {_sqnr(total)}, largest {total.largest_error:.3g}"
    return text


def _errors(comparison: Comparison) -> Table:
    table = new_table("differs most", "A", "B", "relative error", "SQNR", "largest error")
    ranked = sorted(comparison.differing, key=_rank)
    for error in ranked[:_MOST_SHOWN]:
        add_row(table, one_line(error.name), *error.forms, *_cells(error))
    more = len(ranked) - _MOST_SHOWN
    if more > 0:
        add_row(table, f"and {more:,} more, listed by --json", "", "", "", "", "")
    return table


def _rank(error: TensorError) -> tuple[bool, float]:
    """Order tensors: those without values first, then by relative error, the largest first."""
    if error.sums is None:
        return False, 0.0
    relative = error.sums.relative
    return True, float("-inf") if relative is None else -relative


def _cells(error: TensorError) -> tuple[str, str, str]:
    if error.sums is None:
        return f"{error.differing_bytes:,} bytes differ", "", ""
    remark = f" ({error.sums.nonfinite:,} not finite)" if error.sums.nonfinite else ""
    return _ratio(error.sums.relative) + remark, _sqnr(error.sums), f"{error.sums.largest_error:.3g}"


def _ratio(relative: float | None) -> str:
    return "A is zero" if relative is None else f"{relative:.3e}"


def _sqnr(sums: Sums) -> str:
    return "none" if sums.sqnr_db is None else f"{sums.sqnr_db:.2f} dB"


def _names(what: str, tensors: Sequence[Tensor]) -> str:
    more = len(tensors) - _MOST_SHOWN
    shown = ", ".join(one_line(tensor.name) for tensor in tensors[:_MOST_SHOWN])
    return f"{what}, {len(tensors):,}: {shown}" + (f", and {more:,} more" if more > 0 else "")


def _answers(found: EndToEnd) -> list[RenderableType]:
    table = new_table("end to end", "positions", "top-1 agreement", "KL mean", "KL largest", "perplexity A", "B")
    for name, figures in (("text", found.text), (f"answers to {len(found.answers)} prompts", found.prompts)):
        perplexities = (f"{value:.4f}" for value in figures.perplexities)
        cells = (f"{figures.positions:,}", f"{figures.top1:.2%}", f"{figures.kl_mean:.3e}", f"{figures.kl_largest:.3e}")
        add_row(table, name, *cells, *perplexities)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    same = f"{sum(found.answers)} of {len(found.answers)} answers the same to the last token"
    remarks = [
        f"{same} · KL in nats · weights BF16, computed in F32 on the CPU, {versions}",
        f"text: {found.text_title}",
    ]
    return [table, *(Text(remark, style="dim") for remark in remarks)]
