"""The fraction-of-BF16 estimator of weights per rank, and the calibration that keeps it at or above every measurement.

It is for packages made elsewhere, whose conversion is not known tensor by tensor: all bytes that reach the device,
shared evenly, less what a conversion is expected to save. The saving is a fraction of the counted BF16 projections, in
permille, plus 1/16 of the latent pair's bytes. Where the tensors are known, the exact sum of placed slices is used
instead and nothing here applies.

Everything is integer arithmetic, and every floor errs towards a larger estimate or is the definition below.

Source:
    ARCHITECTURE.md, "Two estimators of weights per rank"; tests/data/seed_case.json reproduces a reported case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tonnage.errors import CreditError, Problem

PERMILLE = 1000
LATENT_PAIR_CREDIT_DIVISOR = 16
DEFAULT_STEP_PERMILLE = 5
MXFP8_SAVES = Fraction(31, 64)
"""What MXFP8 saves of BF16 at most: 16 bits an element become 8 and an eighth of a scale byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditInputs:
    """What the credit estimator is told about one package and one topology.

    Attributes:
        device_bytes: All bytes that reach the devices: stored checkpoint plus draft.
        tp_size: Ranks they are shared by.
        counted_bf16_bytes: BF16 bytes of the projections whose conversion the credit stands for.
        latent_pair_bytes: BF16 bytes of the latent pair, which has a fixed credit of its own.
    """

    device_bytes: int
    tp_size: int
    counted_bf16_bytes: int
    latent_pair_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be, and parts larger than the whole."""
        problems = [
            Problem(where="credit", what=f"{name} cannot be negative", expected="0 or more", found=str(value))
            for name, value in (
                ("device_bytes", self.device_bytes),
                ("counted_bf16_bytes", self.counted_bf16_bytes),
                ("latent_pair_bytes", self.latent_pair_bytes),
            )
            if value < 0
        ]
        if self.tp_size < 1:
            problems.append(
                Problem(
                    where="credit", what="no ranks to share by", expected="tp of 1 or more", found=str(self.tp_size)
                )
            )
        if problems:
            raise CreditError(*problems)

    @property
    def per_rank_before_credit_bytes(self) -> int:
        """Even share of the device bytes, floored."""
        return self.device_bytes // self.tp_size

    @property
    def latent_pair_credit_bytes(self) -> int:
        """What the latent pair saves, whatever the permille, floored."""
        return self.latent_pair_bytes // LATENT_PAIR_CREDIT_DIVISOR

    @property
    def ideal_savings_bytes(self) -> int:
        """What MXFP8 saves at most, over all ranks, floored; the latent pair's own credit included."""
        return int(self.counted_bf16_bytes * MXFP8_SAVES) + self.latent_pair_credit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditBound:
    """The most a credit may save without landing under the worst measured rank.

    Attributes:
        inputs: The package and topology.
        largest_measured_bytes: Measured bytes of the largest rank, over all packages.
    """

    inputs: CreditInputs
    largest_measured_bytes: int

    @property
    def savings_bytes(self) -> int:
        """``tp x (per rank before credit - largest measured)``; negative if no credit at all could be right."""
        return self.inputs.tp_size * (self.inputs.per_rank_before_credit_bytes - self.largest_measured_bytes)

    @property
    def projections_bytes(self) -> int:
        """The part of the bound left for the counted projections, after the latent pair's own credit."""
        return self.savings_bytes - self.inputs.latent_pair_credit_bytes

    def fraction_text(self, *, digits: int = 2) -> str:
        """Return the projections' part as percent of the counted bytes, floored: it is a bound, never rounded up.

        Raises:
            CreditError: No projections are counted.
        """
        counted = self.inputs.counted_bf16_bytes
        if counted == 0:
            raise CreditError(Problem(where="credit", what="no counted projection bytes to take a fraction of"))
        scaled = abs(self.projections_bytes) * 100 * 10**digits
        negative = self.projections_bytes < 0
        scaled = -(-scaled // counted) if negative else scaled // counted
        whole, rest = divmod(scaled, 10**digits)
        text = f"{whole}.{rest:0{digits}d}" if digits else str(whole)
        return f"-{text}" if negative else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditChoice:
    """A credit fitted to measurements.

    Attributes:
        bound: The bound it obeys.
        permille: Chosen credit, permille of the counted BF16 bytes.
        step_permille: Step it is a multiple of.
    """

    bound: CreditBound
    permille: int
    step_permille: int

    @property
    def savings_bytes(self) -> int:
        """What the chosen credit saves, over all ranks."""
        inputs = self.bound.inputs
        return credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, self.permille)

    @property
    def estimate_bytes(self) -> int:
        """Estimated weights per rank."""
        return credit_estimate(self.bound.inputs.device_bytes, self.bound.inputs.tp_size, self.savings_bytes)

    @property
    def headroom_bytes(self) -> int:
        """How far the estimate lies above the largest measured rank; never negative."""
        return self.estimate_bytes - self.bound.largest_measured_bytes


def credit_savings(counted_bf16_bytes: int, latent_pair_bytes: int, permille: int) -> int:
    """Return what a conversion is expected to save over all ranks, in bytes.

    Args:
        counted_bf16_bytes: BF16 bytes of the counted projections.
        latent_pair_bytes: BF16 bytes of the latent pair.
        permille: Credit, 0 to 1000 permille of the counted bytes.

    Raises:
        CreditError: The credit is outside 0..1000 permille.
    """
    if not 0 <= permille <= PERMILLE:
        raise CreditError(
            Problem(where="credit", what="credit out of range", expected="0 to 1000 permille", found=str(permille))
        )
    return counted_bf16_bytes * permille // PERMILLE + latent_pair_bytes // LATENT_PAIR_CREDIT_DIVISOR


def credit_estimate(device_bytes: int, tp_size: int, savings: int) -> int:
    """Return estimated weights per rank: the even share less the even share of the savings, both floored.

    Raises:
        CreditError: The savings exceed the bytes there are.
    """
    if savings > device_bytes:
        raise CreditError(
            Problem(
                where="credit",
                what="savings exceed the bytes on the devices",
                expected=f"at most {device_bytes} bytes",
                found=f"{savings} bytes",
            )
        )
    return device_bytes // tp_size - savings // tp_size


def worst_rank_bound(inputs: CreditInputs, measured_bytes: Sequence[int]) -> CreditBound:
    """Return the bound the worst of all measured ranks sets.

    Args:
        inputs: The package and topology the measurements were made with.
        measured_bytes: Bytes of every measured rank, of any number of packages.

    Raises:
        CreditError: Nothing was measured, or a measurement is no size.
    """
    if not measured_bytes:
        raise CreditError(Problem(where="credit", what="no measured ranks", expected="bytes of at least one rank"))
    if min(measured_bytes) <= 0:
        raise CreditError(
            Problem(where="credit", what="a measured rank holds nothing", found=f"{min(measured_bytes)} bytes")
        )
    return CreditBound(inputs=inputs, largest_measured_bytes=max(measured_bytes))


def choose_permille(
    inputs: CreditInputs, measured_bytes: Sequence[int], *, step: int = DEFAULT_STEP_PERMILLE
) -> CreditChoice:
    """Return the largest multiple of the step whose estimate is at or above every measured rank.

    The estimate is computed for every candidate rather than the bound divided, so that no chain of floors can place
    it one byte below a measurement.

    Args:
        inputs: The package and topology.
        measured_bytes: Bytes of every measured rank.
        step: Granularity, permille.

    Raises:
        CreditError: No measurement, a step outside 1..1000, or even no credit for the projections lands below a
            measured rank.
    """
    if not 1 <= step <= PERMILLE:
        raise CreditError(Problem(where="credit", what="step out of range", expected="1 to 1000", found=str(step)))
    bound = worst_rank_bound(inputs, measured_bytes)
    for permille in range(PERMILLE - PERMILLE % step, -1, -step):
        savings = credit_savings(inputs.counted_bf16_bytes, inputs.latent_pair_bytes, permille)
        if savings > inputs.device_bytes:
            continue
        estimate = credit_estimate(inputs.device_bytes, inputs.tp_size, savings)
        if estimate >= bound.largest_measured_bytes:
            return CreditChoice(bound=bound, permille=permille, step_permille=step)
    most = inputs.per_rank_before_credit_bytes - inputs.latent_pair_credit_bytes // inputs.tp_size
    raise CreditError(
        Problem(
            where="credit",
            what="a measured rank holds more than the estimate without any credit",
            expected=f"at most {most} bytes",
            found=f"{bound.largest_measured_bytes} bytes",
        )
    )
