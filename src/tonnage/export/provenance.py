"""``provenance.json``: what a package was made of and how. No clock, no time of a file, no path: facts that repeat.

Figures of conversion are floats; the document is canonical (RFC 8785) all the same, as the manifest is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tonnage.errors import Problem
from tonnage.export.manifest import PackageError, Parallel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tonnage.export.comparison import Compared
    from tonnage.prepare.io import Hash
    from tonnage.prepare.journal import Identity
    from tonnage.prepare.summary import Summary

PROVENANCE_SCHEMA = "tonnage.provenance/1"
_TOPOLOGY = re.compile(r"tp([1-9]\d{0,4}) ep([1-9]\d{0,4}) pp([1-9]\d{0,4})", re.ASCII)
_MXFP8 = {"from": ["BF16"], "codes": "F8_E4M3", "scales": "F8_E8M0 as U8", "block_elements": 32}
_CONVERSION = {"mxfp8": _MXFP8, "mxfp8-experts": _MXFP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is recorded of a preparation, as fields.

    Attributes:
        topology: Parallel sizes.
        family: Of the recipe.
        recipe: Digest of all recipes.
    """

    topology: Parallel
    family: str
    recipe: str


def read_origin(identity: Identity, *, where: str) -> Origin:
    """Return topology and recipe of a preparation.

    Raises:
        PackageError: They are not as prepare writes them.
    """
    match = _TOPOLOGY.fullmatch(identity.topology)
    family, _, digest = identity.recipe.partition(" ")
    if match is None or not digest:
        found = f"{identity.topology!r}, {identity.recipe!r}"
        raise PackageError(Problem(where=where, what="topology or recipe not as prepare records them", found=found))
    tp, ep, pp = map(int, match.groups())
    return Origin(topology=Parallel(tp=tp, ep=ep, pp=pp), family=family, recipe=digest)


def provenance(
    summary: Summary, *, hash_name: Hash, added: Collection[str], where: str, compared: Compared | None = None
) -> dict[str, Any]:
    """Return the document.

    Args:
        summary: Of the preparation.
        hash_name: Algorithm of the package's digests; those of the source keep theirs.
        added: Names of files that were put in when it was packaged.
        where: It is from.
        compared: What was measured between the source and this, if it was.

    Raises:
        PackageError: A field of it is not as prepare writes it.
    """
    identity = summary.identity
    origin = read_origin(identity, where=where)
    return {
        "schema": PROVENANCE_SCHEMA,
        "tonnage_version": summary.tonnage_version,
        "source": {
            "name": summary.checkpoint,
            "digest": identity.checkpoint,
            "hash": identity.hash,
            "files": [msgspec.to_builtins(source) for source in summary.sources] or _undigested(identity),
        },
        "added": sorted(added),
        "recipe": {"family": origin.family, "digest": origin.recipe},
        "options": {
            "topology": msgspec.to_builtins(origin.topology),
            "ranks": list(identity.ranks),
            "engine": identity.engine,
            "convert": identity.convert,
            "scale_rule": identity.scale_rule,
            "nonfinite": identity.nonfinite,
            "layout": identity.layout,
            "quant_style": identity.quant_style,
            "hash": hash_name,
            "format_version": identity.format_version,
        },
        "schedule": identity.schedule,
        "conversion": _conversion(identity),
        "numerics": _numerics(summary, compared),
    }


def canonical(document: Mapping[str, Any], *, where: str) -> bytes:
    """Return the canonical bytes of a document (RFC 8785).

    Raises:
        PackageError: A number in it has no canonical form.
    """
    import rfc8785  # noqa: PLC0415 - an extra

    try:
        return rfc8785.dumps(dict(document))
    except (rfc8785.CanonicalizationError, RecursionError) as error:
        raise PackageError(Problem(where=where, what="has no canonical form", found=str(error))) from error


def _undigested(identity: Identity) -> list[dict[str, Any]]:
    return [{"name": facts.name, "nbytes": facts.nbytes, "digest": None} for facts in identity.sources]


def _conversion(identity: Identity) -> dict[str, Any] | None:
    """Return the rule of the conversion; ``None`` without one."""
    if identity.convert == "none":
        return None
    try:
        rule = _CONVERSION[identity.convert]
    except KeyError:
        raise PackageError(
            Problem(where="convert", what="unknown conversion", expected=", ".join(_CONVERSION), found=identity.convert)
        ) from None
    return {**rule, "scale_rule": identity.scale_rule, "nonfinite": identity.nonfinite}


def _numerics(summary: Summary, compared: Compared | None) -> dict[str, Any]:
    """Return the class, for what was converted tensor by tensor what it cost, and what that does to the model."""
    table = sorted(summary.converted, key=lambda tensor: tensor.tensor)
    return {
        "class": "converted" if table else "neutral",
        "converted": [msgspec.to_builtins(tensor) for tensor in table],
        "compared": msgspec.to_builtins(compared),
    }
