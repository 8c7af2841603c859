"""The figures logs carry: exact decimals as printed, their bytes, and what is known about each by name.

A log prints rounded decimals. ``Quantity`` keeps the decimal itself, so that nothing is lost by reading it; its bytes
are floored here, in :attr:`Quantity.nbytes`, and nowhere else. What SGLang prints as GB is GiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tonnage.units import GIB, MIB

Kind = Literal["bytes", "tokens", "count", "number", "text"]
Worst = Literal["largest", "smallest", "last", "first"]

_BILLION = 1_000_000_000
_FEWEST_DIGITS = {GIB: 2, MIB: 0}
"""Engines round GiB to two decimals and may drop a zero at the end: ``19.5 GiB`` is 19.50, not 19.45 to 19.55."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A decimal as a log prints it, or the exact sum of such decimals.

    Attributes:
        number: The digits, sign included: 1499 for 14.99.
        digits: How many of them are decimals.
        unit: Bytes of one: 2**30 for GiB, 1 for bytes, tokens, counts and ratios.
        width: In billionths of the unit, how wide the interval is in which all values lie that print so; of a sum, all
            intervals together; 0 if it is exact.
    """

    number: int
    digits: int = 0
    unit: int = 1
    width: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes (or the whole number) of the decimal, floored: the one place where that happens."""
        return self.number * self.unit // _power(self.digits)

    @property
    def rounding_nbytes(self) -> int:
        """The width in bytes, rounded up; 0 if exact."""
        return -(-self.width * self.unit // _BILLION)

    @property
    def least_nbytes(self) -> int:
        """A number of bytes no value that prints so lies under."""
        return self.nbytes - (self.rounding_nbytes + 1) // 2

    @property
    def text(self) -> str:
        """The decimal, without a unit."""
        digits = f"{abs(self.number):0{self.digits + 1}d}"
        whole, rest = digits[: len(digits) - self.digits], digits[len(digits) - self.digits :]
        return f"{'-' if self.number < 0 else ''}{whole}{'.' if rest else ''}{rest}"

    def __add__(self, other: Quantity) -> Quantity:
        return self._with(other, 1)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._with(other, -1)

    def _in_bytes(self) -> Quantity:
        return Quantity(number=self.nbytes, width=self.rounding_nbytes * _BILLION)

    def _with(self, other: Quantity, sign: int) -> Quantity:
        if self.unit != other.unit:
            return self._in_bytes()._with(other._in_bytes(), sign)  # noqa: SLF001 - of the same class
        digits = max(self.digits, other.digits)
        left = self.number * _power(digits - self.digits)
        number = left + sign * other.number * _power(digits - other.digits)
        return Quantity(number=number, digits=digits, unit=self.unit, width=self.width + other.width)


def _power(digits: int) -> int:
    return int("1" + "0" * digits)


def width_of(digits: int, unit: int) -> int:
    """Return the width of what prints with so many decimals, at most nine; exact for bytes, tokens and counts."""
    return 0 if unit == 1 else _power(9 - max(digits, _FEWEST_DIGITS[unit]))


def total(quantities: Iterable[Quantity]) -> Quantity | None:
    """Return the sum, or nothing if there is nothing to add."""
    result: Quantity | None = None
    for quantity in quantities:
        result = quantity if result is None else result + quantity
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One figure on one line of a log.

    Attributes:
        name: Which figure, a key of ``FIGURES``.
        quantity: Its number; ``None`` for text.
        text: What was printed, bounded; the value of a text.
        tokens: Of a cache pool, the tokens it holds.
        device: GPU the line names, where the figure is of one device and no rank is named.
        order: Place among the readings of the log.
    """

    name: str
    quantity: Quantity | None = None
    text: str = ""
    tokens: int | None = None
    device: int | None = None
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSpec:
    """What is known of a figure by its name.

    Attributes:
        title: For people.
        kind: What its number counts.
        unit: Bytes of one, where the kind is bytes.
        worst: Which one counts when there are several, of several ranks or of one.
    """

    title: str
    kind: Kind = "bytes"
    unit: int = GIB
    worst: Worst = "largest"


def _gib(title: str, worst: Worst = "largest") -> FigureSpec:
    return FigureSpec(title=title, worst=worst)


def _plain(title: str, kind: Kind, worst: Worst = "smallest") -> FigureSpec:
    return FigureSpec(title=title, kind=kind, unit=1, worst=worst)


FIGURES: dict[str, FigureSpec] = {
    # supply
    "total": _gib("memory of the GPU", "smallest"),
    "free": _gib("free before the engine took anything", "smallest"),
    "utilization": _plain("utilization asked for", "number", "last"),
    "requested": _gib("memory asked for", "smallest"),
    "baseline": _gib("context and communication (B0)"),
    "init": _gib("used by the init of distributed groups"),
    "before_weights": _gib("free before weights", "smallest"),
    "node_total": _gib("memory of the NUMA node", "smallest"),
    # weights
    "weights": _gib("weights"),
    "weights_summary": _gib("weights, as summed up later"),
    "weights_read": FigureSpec(title="weights read from the files", unit=1),
    "weights_held": FigureSpec(title="parameters of the model, as loaded", unit=1),
    "draft_weights": _gib("weights of the draft"),
    "after_weights": _gib("free after weights", "smallest"),
    # what is neither weights nor cache
    "consumed": _gib("weights and everything else persistent"),
    "non_torch": _gib("outside of torch"),
    "activation_peak": _gib("activation peak"),
    "non_kv": _gib("all but the cache"),
    "process": _gib("held by the process, its cache aside"),
    "graphs": _gib("CUDA graphs"),
    "draft_graphs": _gib("CUDA graphs of the draft"),
    "graphs_estimated": _gib("CUDA graphs as estimated"),
    "transient": FigureSpec(title="largest transient while loading", unit=MIB),
    "free_after_load": FigureSpec(title="free after loading", unit=MIB, worst="smallest"),
    # cache
    "kv_budget": _gib("budget of the cache", "smallest"),
    "kv_reserved": _gib("cache reserved by a byte flag", "smallest"),
    "kv_in_use": _gib("cache in use"),
    "kv_tokens": _plain("tokens the cache holds", "tokens"),
    "concurrency_tokens": _plain("length the concurrency is for", "tokens", "last"),
    "max_concurrency": _plain("requests of that length at once", "number"),
    "kv_suggested": FigureSpec(title="cache that would fit what was asked for", unit=1, worst="smallest"),
    "kv_suggested_full": FigureSpec(title="cache that would fill the GPU", unit=1, worst="smallest"),
    "attention_block_tokens": _plain("tokens of an attention block", "tokens", "last"),
    "state_padding_percent": _plain("padding of a state page, percent", "number", "last"),
    "padding_layers": _plain("layers added as padding", "count", "last"),
    "padding_waste_percent": _plain("waste by padding layers, percent at most", "number", "last"),
    "auto_fit_from": _plain("length before it was fitted", "tokens", "last"),
    "auto_fit_to": _plain("length after it was fitted", "tokens"),
    "pool": _gib("cache of tokens"),
    "draft_pool": _gib("cache of the draft"),
    "swa_pool": _gib("full and sliding cache"),
    "swa_tokens": _plain("tokens of the sliding cache", "tokens"),
    "full_tokens": _plain("tokens of the full cache", "tokens"),
    "state_slots": _plain("slots of recurrent state", "count"),
    "state_conv": _gib("recurrent state, convolutions"),
    "state_ssm": _gib("recurrent state"),
    "state_intermediate": _gib("recurrent state of draft steps"),
    "state_conv_window": _gib("convolution windows of draft steps"),
    "pool_end": _gib("free after the cache", "smallest"),
    "available": _gib("free when ready", "smallest"),
    "prefill_chunk_tokens": _plain("prefill chunk", "tokens", "last"),
    "context_tokens": _plain("longest context", "tokens", "last"),
    "max_running": _plain("requests at once", "count"),
    "max_running_asked": _plain("requests at once, asked for", "count", "last"),
    "cache_size_tokens": _plain("tokens of the cache, configured", "tokens", "last"),
    # refusals
    "refused_free": _gib("free, too little for what was asked for", "smallest"),
    "refused_total": _gib("memory of the GPU", "smallest"),
    "refused_requested": _gib("memory asked for and not free"),
    "refused_utilization": _plain("utilization refused", "number", "last"),
    "refused_length": _plain("length refused", "tokens", "last"),
    "kv_needed": _gib("cache one request needs"),
    "kv_available": _gib("cache there is", "smallest"),
    "kv_est_max_len": _plain("length that would fit", "tokens"),
    "least_fraction": _plain("least memory fraction that would do", "number", "largest"),
    "refusal": _plain("refused", "text", "last"),
    # what the engine is and was told
    "version": _plain("version", "text", "last"),
    "model": _plain("model", "text", "last"),
    "tp": _plain("tensor parallel size", "count", "last"),
    "pp": _plain("pipeline parallel size", "count", "last"),
    "dp": _plain("data parallel size", "count", "last"),
    "ep": _plain("expert parallel", "text", "last"),
    "dcp": _plain("decode context parallel size", "count", "last"),
    "max_model_len": _plain("longest context, as set", "tokens", "last"),
    "max_num_seqs": _plain("requests at once, as set", "count", "last"),
    "max_num_batched_tokens": _plain("batched tokens, as set", "tokens", "last"),
    "kv_cache_dtype": _plain("dtype of the cache, as set", "text", "last"),
    "dtype": _plain("dtype of the model, as set", "text", "last"),
    "quantization": _plain("quantization, as set", "text", "last"),
    "block_size": _plain("tokens of a block, as set", "tokens", "last"),
    "gpu_memory_utilization": _plain("memory fraction, as set", "number", "last"),
    "draft": _plain("speculation, as set", "text", "last"),
}  # fmt: skip
"""Every figure there is, in report order."""

SETTINGS = tuple(FIGURES)[list(FIGURES).index("version") :]
"""What the engine is and was told: said once for a start, not measured by a rank."""


def worst_of(readings: Iterable[Reading]) -> Reading:
    """Return the reading that counts out of several of one figure; never of none."""
    several = tuple(readings)
    spec = FIGURES[several[0].name]
    if spec.worst in ("last", "first") or several[0].quantity is None:
        return several[0] if spec.worst == "first" else max(several, key=lambda reading: reading.order)
    sign = 1 if spec.worst == "largest" else -1
    return max(several, key=lambda reading: sign * _key(reading))


def _key(reading: Reading) -> int:
    """Compare decimals without rounding them: at most nine decimals are read."""
    assert reading.quantity is not None
    return reading.quantity.number * reading.quantity.unit * _power(9 - reading.quantity.digits)
