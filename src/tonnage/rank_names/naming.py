"""Names and metadata of a rank-sliced EXL3 checkpoint, or why prepared ranks cannot be one. Pure.

Every tensor of a routed expert stands there once per rank, as ``MODULE.rankR.PART``; a worker takes those of its own
rank, drops ``.rankR`` and passes over the others. Everything else is stored whole under its own name. The config fixes
the tensor-parallel size, the codebook, the rate, the layers and the number of experts in ``hybrid_tr3_tail``.

Refused is what that loader does not read or nobody has seen it read: other codebooks than mcg, signs in place of
scales, biases, projections of one expert at several rates, EXL3 outside the routed experts, experts held whole by some
ranks.

Source:
    The ``exl3`` quantisation of the local-inference-lab fork of vLLM: ``_configure_rank_sliced``,
    ``_load_rank_sliced_bitrates``, ``normalize_rank_sliced_weight_name``. Shapes and dtypes as in the published headers
    of GLM-5.2-EXL3-TR3-3.36bpw (rotation layout ``per_expert_v1``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.checkpoint.recognise import EXL3_SUFFIXES
from tonnage.errors import PlacementError, Problem, raise_if_any
from tonnage.formats.quantized import EXL3_GRAIN

if TYPE_CHECKING:
    from tonnage.prepare.reader import Cut, TensorView

Ranks = Mapping[int, Mapping[str, "TensorView"]]
"""What every rank holds, by name."""

TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
RATES_FILE = "bits_per_expert.json"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PARTS = ("trellis", "suh", "svh", "mcg")
_DTYPES = {"trellis": "I16", "suh": "F16", "svh": "F16", "mcg": "I32"}
_RATES = (3, 4, 5, 6)
"""Bits per weight that loader has kernels for."""

_TILE = 16
_NAME = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNames:
    """What is sliced by rank.

    Attributes:
        tp: Number of ranks.
        rates: For every layer the bits per weight of its experts, in order.
        sliced: Names in the prepared ranks, in the order they are written.
    """

    tp: int
    rates: Mapping[int, tuple[int, ...]]
    sliced: tuple[str, ...]

    @property
    def is_mixed(self) -> bool:
        """Whether there are experts at several rates."""
        return len({rate for rates in self.rates.values() for rate in rates}) > 1

    def tail(self) -> dict[str, Any]:
        """Return ``hybrid_tr3_tail`` of config.json."""
        rates = sorted({rate for layer in self.rates.values() for rate in layer})
        mixed = {"k_values": rates, "bits_per_expert": f"{RATES_FILE}:k"} if self.is_mixed else {}
        return {
            "format": "exl3-trellis",
            "bits": "mixed" if self.is_mixed else rates[0],
            **mixed,
            "codebook": "mcg",
            "experts_per_layer": len(self.rates[min(self.rates)]),
            "moe_layers": [min(self.rates), max(self.rates)],
            "rotation_layout": "per_expert_v1",
            "tensor_schema": TENSOR_SCHEMA,
            "tp": self.tp,
        }

    def rates_document(self) -> dict[str, Any]:
        """Return what ``bits_per_expert`` refers to."""
        return {str(layer): {"k": list(rates)} for layer, rates in sorted(self.rates.items())}


def of_rank(name: str, rank: int) -> str:
    """Return the name of a rank's part of an expert's tensor.

    >>> of_rank("model.layers.3.mlp.experts.0.up_proj.trellis", 1)
    'model.layers.3.mlp.experts.0.up_proj.rank1.trellis'
    """
    module, _, part = name.rpartition(".")
    return f"{module}.rank{rank}.{part}"


def rank_names(ranks: Ranks, *, where: str) -> RankNames:
    """Return what is to be sliced.

    Args:
        ranks: Headers of all ranks of a preparation.
        where: Name of the directory, for refusals.

    Raises:
        PlacementError: The ranks cannot be such a checkpoint; every reason is named.
    """
    names = sorted({name for held in ranks.values() for name in held})
    found = {name: match for name in names if (match := _NAME.fullmatch(name)) is not None}
    raise_if_any(PlacementError, (Problem(where=where, **fact) for fact in _facts(names, found, ranks)))
    keyed = {(int(m[1]), int(m[2]), _PROJECTIONS.index(m[3]), _PARTS.index(m[4])): m[0] for m in found.values()}
    rates: dict[int, dict[int, int]] = {}
    for (layer, expert, _, part), name in keyed.items():
        if part == 0:
            rates.setdefault(layer, {})[expert] = _rate(_whole_shape(ranks[0][name]))
    return RankNames(
        tp=len(ranks),
        rates={layer: tuple(rate for _, rate in sorted(rates[layer].items())) for layer in sorted(rates)},
        sliced=tuple(name for _, name in sorted(keyed.items())),
    )


def _facts(names: list[str], found: Mapping[str, re.Match[str]], ranks: Ranks) -> Iterator[dict[str, str]]:
    """Yield what keeps the ranks from being such a checkpoint; what depends on earlier facts only without them."""
    if not found:
        yield {"what": "no experts to be sliced by rank", "expected": TENSOR_SCHEMA}
    if sorted(ranks) != list(range(len(ranks))):
        yield {"what": "not all ranks are here", "found": str(sorted(ranks))}
        return
    strange = [name for name in names if name not in found and f".{name.rpartition('.')[2]}" in EXL3_SUFFIXES]
    for name in strange:
        yield {"tensor": name, "what": "EXL3 outside the routed experts", "expected": TENSOR_SCHEMA}
    modules: dict[tuple[int, int], dict[str, list[str]]] = {}
    for name, match in found.items():
        parts = modules.setdefault((int(match[1]), int(match[2])), {})
        parts.setdefault(match[3], []).append(name)
    wrong = list(_module_facts(modules))
    yield from wrong
    if not wrong:
        for experts in modules.values():
            yield from _expert_facts(experts, ranks)


def _module_facts(modules: Mapping[tuple[int, int], Mapping[str, list[str]]]) -> Iterator[dict[str, str]]:
    layers: dict[int, set[int]] = {}
    for (layer, expert), projections in modules.items():
        layers.setdefault(layer, set()).add(expert)
        for projection in _PROJECTIONS:
            parts = sorted(name.rpartition(".")[2] for name in projections.get(projection, ()))
            if parts != sorted(_PARTS):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                yield {"tensor": module, "what": "parts", "expected": ", ".join(_PARTS), "found": ", ".join(parts)}
    counts = {len(experts) for experts in layers.values() if experts == set(range(len(experts)))}
    if layers and (len(counts) != 1 or any(experts != set(range(max(counts))) for experts in layers.values())):
        yield {"what": "not the same experts, counted from 0, in every layer"}
    if layers and sorted(layers) != list(range(min(layers), max(layers) + 1)):
        yield {"what": "layers with routed experts are not one run", "found": str(sorted(layers)[:40])}


def _expert_facts(projections: Mapping[str, list[str]], ranks: Ranks) -> Iterator[dict[str, str]]:
    """Yield what is wrong with the shapes, the rate and the cuts of one expert."""
    rates = set()
    for projection, names in projections.items():
        by_part = {name.rpartition(".")[2]: name for name in names}
        shape = _whole_shape(next(held[by_part["trellis"]] for held in ranks.values() if by_part["trellis"] in held))
        rates.add(_rate(shape))
        if len(shape) != 3 or _rate(shape) not in _RATES or shape[2] % _TILE:
            expected = f"[.., .., {_TILE} x K], K one of {_RATES}"
            yield {"tensor": by_part["trellis"], "what": "shape", "expected": expected, "found": str(list(shape))}
            continue
        size = shape[0 if projection == "down_proj" else 1] * _TILE
        if size % (len(ranks) * EXL3_GRAIN):
            expected, found = f"a multiple of {EXL3_GRAIN} for each of {len(ranks)} ranks", str(size)
            yield {"tensor": by_part["trellis"], "what": "channels", "expected": expected, "found": found}
            continue
        for part, name in by_part.items():
            yield from _part_facts(name, part, shape, 0 if projection == "down_proj" else 1, ranks)
    if len(rates) > 1:
        yield {"tensor": next(iter(projections.values()))[0], "what": "projections of one expert at several rates"}


def _part_facts(
    name: str, part: str, trellis: tuple[int, ...], cut_axis: int, ranks: Ranks
) -> Iterator[dict[str, str]]:
    """Yield where ranks do not hold equal parts; ``cut_axis`` is 0 where inputs are cut, 1 where outputs are."""
    channels = {"suh": trellis[0] * _TILE, "svh": trellis[1] * _TILE}
    shape = trellis if part == "trellis" else (channels[part],) if part in channels else ()
    axis = {"trellis": cut_axis, ("suh", "svh")[cut_axis]: 0}.get(part)
    for rank in range(len(ranks)):
        held = ranks[rank].get(name)
        cut: Cut | None = None
        if axis is not None and len(ranks) > 1:
            width = shape[axis] // len(ranks)
            cut = (axis, ((rank * width, (rank + 1) * width),), shape)
        local = shape if cut is None else (*shape[: cut[0]], shape[cut[0]] // len(ranks), *shape[cut[0] + 1 :])
        expected = (_DTYPES[part], local, cut)
        found = None if held is None else (held.dtype, held.shape, held.cut)
        if found != expected:
            yield {"tensor": name, "what": f"of rank {rank}", "expected": str(expected), "found": str(found)}


def _whole_shape(view: TensorView) -> tuple[int, ...]:
    return view.shape if view.cut is None else view.cut[2]


def _rate(trellis: tuple[int, ...]) -> int:
    return trellis[-1] // _TILE if trellis else 0
