"""The tensors found for one instance of a module: the storage format they are, or why they are none.

A format is recognised only if it would store exactly these tensors. If none does, the nearest one says what is missing,
what has another shape and what does not belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tonnage.checkpoint.recognise import AUXILIARY, EXL3_SUFFIXES, PLAIN_DTYPES, candidates
from tonnage.checkpoint.tally import Kind
from tonnage.errors import TonnageError
from tonnage.formats.quantized import exl3
from tonnage.formats.storage import Dim, StorageFormat
from tonnage.recipes.modules import Module, Stored, stored_tensors

Recognised = tuple[StorageFormat, tuple[Stored, ...]]
_ONE = (Dim("none", 1),)
"""The axis of a scalar stored as a vector of one."""

RATES = "[in / 16, out / 16, 16 x bits], bits 1..8, or 1.5, 2.5, 3.5 with codebook mul1"


@dataclass(frozen=True, slots=True)
class Odd:
    """One tensor that is not as the nearest format has it; ``found`` is ``None`` where it is missing."""

    suffix: str
    expected: str | None
    found: Kind | None

    @property
    def what(self) -> str:
        """The rule that is broken."""
        if self.found is None:
            return "missing tensor"
        return "misshapen tensor" if self.expected else "unexpected tensor beside the others of this module"


def recognise(module: Module, found: Mapping[str, Kind], model_dtype: str) -> Recognised | None:
    """Return the format whose tensors are exactly those found, dtypes of plain tensors as found."""
    if not module.rule.is_linear:
        return _recognise_single(module, found, model_dtype)
    extra = _auxiliary(found)
    kept = {tensor.suffix for tensor in extra}
    weights = {suffix: kind for suffix, kind in found.items() if suffix not in kept}
    for fmt in _candidates(module, found):
        stored = _as_stored(module, fmt, found, model_dtype)
        if stored is not None and {t.suffix: Kind(t.dtype, t.shape) for t in stored} == weights:
            return fmt, (*stored, *extra)
    return None


def explain(module: Module, found: Mapping[str, Kind], model_dtype: str) -> tuple[Odd, ...]:
    """Return what keeps the tensors found from being a module: the fewest differences to any format."""
    options = [_differences(module, fmt, found, model_dtype) for fmt in (module.fmt, *_nearest(module, found))]
    best = min(filter(None, options), key=len, default=())
    return best or tuple(Odd(suffix, None, kind) for suffix, kind in sorted(found.items()))


def _nearest(module: Module, found: Mapping[str, Kind]) -> Iterator[StorageFormat]:
    yield from _candidates(module, found)
    if not EXL3_SUFFIXES.isdisjoint(found):
        yield exl3(4, codebook="mcg" if ".mcg" in found else "mul1" if ".mul1" in found else "3inst")


def _differences(module: Module, fmt: StorageFormat, found: Mapping[str, Kind], model_dtype: str) -> tuple[Odd, ...]:
    stored = _as_stored(module, fmt, found, model_dtype)
    if stored is None:
        return ()
    expected = {tensor.suffix: Kind(tensor.dtype, tensor.shape) for tensor in stored}
    extra = {tensor.suffix for tensor in _auxiliary(found)} if module.rule.is_linear else set()
    odd = []
    for suffix in sorted((expected.keys() | found.keys()) - extra):
        wanted, kind = expected.get(suffix), found.get(suffix)
        if wanted != kind:
            odd.append(Odd(suffix, _shown(suffix, wanted, kind), kind))
    return tuple(odd)


def _shown(suffix: str, wanted: Kind | None, kind: Kind | None) -> str | None:
    if wanted is None:
        return None
    if suffix == ".trellis" and (kind is None or kind.shape[2:] != wanted.shape[2:]):
        return RATES
    return f"{wanted.dtype} {list(wanted.shape)}"


def _candidates(module: Module, found: Mapping[str, Kind]) -> Iterator[StorageFormat]:
    """Yield the formats the suffixes can mean, the leading axis of stacked experts taken off."""
    if not module.rule.is_linear:
        return
    bias = bias_suffix(module)
    logical = {
        suffix: Kind(kind.dtype, kind.shape[1:]) if module.stack and kind.shape[:1] == (module.stack,) else kind
        for suffix, kind in found.items()
        if suffix != bias and suffix not in AUXILIARY
    }
    yield from candidates(logical, module.out_size, module.in_size)


def bias_suffix(module: Module) -> str:
    """Return what stands behind a module's name where its bias is stored."""
    return "_bias" if module.rule.bare else ".bias"


def _as_stored(
    module: Module, fmt: StorageFormat, found: Mapping[str, Kind], model_dtype: str
) -> tuple[Stored, ...] | None:
    """Return what a format would store, with the dtypes found where it leaves them open; ``None`` if it cannot."""
    try:
        stored = stored_tensors(module, fmt, model_dtype)
    except TonnageError:
        return None
    return tuple(_as_found(tensor, found, fmt) for tensor in stored)


def _auxiliary(found: Mapping[str, Kind]) -> tuple[Stored, ...]:
    """Return the scalars of quantised KV caches that stand beside a projection."""
    return tuple(
        Stored(
            suffix=suffix, dtype=found[suffix].dtype, shape=found[suffix].shape, dims=_ONE[: len(found[suffix].shape)]
        )
        for suffix in AUXILIARY
        if suffix in found and found[suffix].shape in ((), (1,))
    )


def _as_found(tensor: Stored, found: Mapping[str, Kind], fmt: StorageFormat) -> Stored:
    """Take over what formats leave open: the float dtype of weights, biases and scales, ``[1]`` for a scalar."""
    kind = found.get(tensor.suffix)
    if kind is None:
        return tensor
    if tensor.shape == () and kind.shape == (1,):
        tensor = replace(tensor, shape=(1,), dims=_ONE)
    floats = frozenset(PLAIN_DTYPES)
    if tensor.dtype in floats and kind.dtype in floats and (fmt.is_plain or tensor.suffix not in (".suh", ".svh")):
        return replace(tensor, dtype=kind.dtype)
    return tensor


def _recognise_single(module: Module, found: Mapping[str, Kind], model_dtype: str) -> Recognised | None:
    stored = _as_stored(module, module.fmt, found, model_dtype)
    if stored is None:
        return None
    (tensor,) = stored
    same = found.keys() == {""} and found[""] == Kind(tensor.dtype, tensor.shape)
    return (module.fmt, stored) if same else None
