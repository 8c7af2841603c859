"""The manifest of a slot container: every rule of the format, every problem at once; and writing one.

Stricter than the public reader where that costs no valid file: true and false are no integers, layer keys are canonical
decimals, file names are plain and distinct, digests are 64 lower-case hexadecimal digits, and a pair rate needs whole
pairs of slots. The manifest has no digest of its own and no byte counts: sizes come from ``exl3_v1``.

Source:
    local-inference-lab/b12x, schema of exl3-v1; the rules of BTX are the same under other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tonnage.errors import ConfigError, Problem, raise_if_any
from tonnage.formats.exl3_v1 import MCG_SEED, PAIR_BITS, SLOT_CHANNELS, SlotGeometry
from tonnage.formats.exl3_v1_names import DIALECTS, EXL3_V1, Codebook, Dialect
from tonnage.formats.manifest_section import Section, describe

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LAYER_KEY = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_LONGEST_FILE_NAME = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayer:
    """One layer file of the container.

    Attributes:
        index: Layer number.
        file: Plain name, beside the manifest.
        sha256: Digest of the whole file, lower-case hexadecimal.
    """

    index: int
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotManifest:
    """A checked manifest: geometry, and one file per layer in ascending order."""

    dialect: Dialect
    geometry: SlotGeometry
    layers: tuple[SlotLayer, ...]


def parse_manifest(document: object, *, where: str) -> SlotManifest:
    """Return a manifest of either spelling, checked whole.

    Args:
        document: The decoded JSON.
        where: File name for messages.

    Raises:
        ConfigError: It is no such manifest, or breaks rules of it; every problem at once.
    """
    problems: list[Problem] = []
    top = Section(document, where, problems)
    dialect = _dialect(top)
    codebook, geometry = _geometry(top, dialect)
    _check_seed(top, codebook)
    layers = _layers(top.section("layers"), geometry)
    top.close()
    raise_if_any(ConfigError, problems)
    if geometry is None:
        raise ValueError(f"{where}: no geometry and no problem")
    return SlotManifest(dialect=dialect, geometry=geometry, layers=layers)


def manifest_document(
    geometry: SlotGeometry, digests: Mapping[int, str], *, dialect: Dialect = EXL3_V1
) -> dict[str, object]:
    """Return the manifest of layer files with these digests, under their usual names, ready for JSON with sorted keys.

    Args:
        geometry: What the layer files hold.
        digests: SHA-256 of every layer file, by layer number.
        dialect: Spelling to write.

    Raises:
        ConfigError: A layer has no digest, or a digest no layer, or is none.
    """
    uniform = geometry.bits is not None
    hadamard: dict[str, object] = {
        dialect.hadamard_key: geometry.intermediate_hadamard,
        "per_expert_input_rotations": geometry.per_expert_input_rotations,
    }
    if geometry.intermediate_hadamard:
        hadamard |= {"pre_block": geometry.pre_block, "post_block": geometry.post_block}
    rates: dict[str, object] = {"structure": "uniform" if uniform else "per_expert_pair"}
    rates |= {"bits": geometry.bits} if uniform else {"pair_kinds": list(geometry.pair_kinds)}
    document: dict[str, object] = {
        "kind": dialect.kind,
        "schema": dialect.schema,
        "codebook": dict(dialect.codebooks)[geometry.codebook],
        "geometry": {
            "num_experts": geometry.num_experts,
            "hidden_size": geometry.hidden_size,
            "intermediate_size": geometry.intermediate_size,
            dialect.channels_key: SLOT_CHANNELS,
            dialect.slots_key: geometry.num_slots,
            "moe_layer_indices": list(geometry.moe_layer_indices),
        },
        "rates": rates,
        "hadamard": hadamard,
        "layout": {
            dialect.row_alignment_key: geometry.row_alignment,
            "extent_alignment_slots": geometry.extent_alignment_slots,
            "extent_barriers": list(geometry.extent_barriers),
        },
        "layers": {
            str(layer): {"file": dialect.layer_file(layer), "sha256": digest}
            for layer, digest in sorted(digests.items())
        },
    }
    if geometry.codebook == "mcg":
        document["codebook_seed"] = MCG_SEED
    parse_manifest(document, where=dialect.manifest_name)
    return document


def _dialect(top: Section) -> Dialect:
    """Return the spelling, or refuse at once a document that is no such manifest: nothing else in it can be judged."""
    kind, schema = top.take("kind"), top.take("schema")
    for dialect in DIALECTS:
        if (kind, schema) == (dialect.kind, dialect.schema):
            return dialect
    expected = " or ".join(f"kind {dialect.kind} with schema {dialect.schema}" for dialect in DIALECTS)
    raise ConfigError(
        Problem(
            where=top.where,
            what="not a slot container manifest",
            expected=expected,
            found=f"kind {describe(kind)} with schema {describe(schema)}",
        )
    )


def _geometry(top: Section, dialect: Dialect) -> tuple[Codebook | None, SlotGeometry | None]:
    """Return codebook and geometry as far as their fields have the right types."""
    spelled = {text: codebook for codebook, text in dialect.codebooks}
    codebook = top.one_of("codebook", spelled)
    sizes, rates, layout = top.section("geometry"), top.section("rates"), top.section("layout")
    num_experts = sizes.integer("num_experts")
    hidden_size = sizes.integer("hidden_size")
    intermediate_size = sizes.integer("intermediate_size")
    sizes.equal(dialect.channels_key, SLOT_CHANNELS)
    if intermediate_size is not None:
        sizes.equal(dialect.slots_key, intermediate_size // SLOT_CHANNELS)
    layers = sizes.integers("moe_layer_indices")
    sizes.close(dialect.slots_key)
    bits, pair_kinds = _rates(rates)
    blocks = _hadamard(top.section("hadamard"), dialect)
    row_alignment = layout.integer(dialect.row_alignment_key)
    alignment = layout.integer("extent_alignment_slots")
    barriers = layout.integers("extent_barriers") if layout.has("extent_barriers") else ()
    layout.close()
    if (  # one test for all, so that the type checker sees it
        codebook is None
        or num_experts is None
        or hidden_size is None
        or intermediate_size is None
        or layers is None
        or pair_kinds is None
        or blocks is None
        or row_alignment is None
        or alignment is None
        or barriers is None
    ):
        return (None if codebook is None else spelled[codebook]), None
    per_expert, pre_block, post_block = blocks
    try:
        geometry = SlotGeometry(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            moe_layer_indices=tuple(sorted(layers)),
            codebook=spelled[codebook],
            bits=bits,
            pair_kinds=pair_kinds,
            per_expert_input_rotations=per_expert,
            pre_block=pre_block,
            post_block=post_block,
            row_alignment=row_alignment,
            extent_alignment_slots=alignment,
            extent_barriers=tuple(sorted(barriers)),
        )
    except ConfigError as error:
        top.problems += [replace(problem, where=f"{top.where}: {problem.where}") for problem in error.problems]
        return spelled[codebook], None
    return spelled[codebook], geometry


def _rates(rates: Section) -> tuple[int | None, tuple[str, ...] | None]:
    """Return bits and pair kinds; the kinds are None if the section cannot be read."""
    structure = rates.one_of("structure", ("uniform", "per_expert_pair"))
    if structure == "uniform":
        bits = rates.integer("bits")
        rates.close()
        return bits, None if bits is None else ()
    if structure == "per_expert_pair":
        kinds = rates.texts("pair_kinds", PAIR_BITS)
        rates.close()
        return None, kinds
    rates.close("bits", "pair_kinds")
    return None, None


def _hadamard(hadamard: Section, dialect: Dialect) -> tuple[bool, int | None, int | None] | None:
    """Return per-expert rotations and both blocks, or None if the section cannot be read."""
    switched = hadamard.boolean(dialect.hadamard_key)
    per_expert = hadamard.boolean("per_expert_input_rotations")
    if switched is None:
        hadamard.close("pre_block", "post_block")
        return None
    if not switched:
        hadamard.close()
        return None if per_expert is None else (per_expert, None, None)
    pre_block, post_block = hadamard.integer("pre_block"), hadamard.integer("post_block")
    hadamard.close()
    if per_expert is None or pre_block is None or post_block is None:
        return None
    return per_expert, pre_block, post_block


def _check_seed(top: Section, codebook: Codebook | None) -> None:
    if codebook == "mcg":
        top.equal("codebook_seed", MCG_SEED)
    elif (seed := top.take("codebook_seed")) is not None and codebook is not None:
        top.refuse("codebook_seed", f"codebook {codebook} has no seed", expected="no such key", found=describe(seed))


def _layers(section: Section, geometry: SlotGeometry | None) -> tuple[SlotLayer, ...]:
    layers, files = [], set()
    for key in section.keys():  # noqa: SIM118 - a section is no mapping
        entry = section.section(key)
        file, digest = entry.text("file"), entry.text("sha256")
        entry.close()
        if _LAYER_KEY.fullmatch(key) is None:
            section.refuse(key, "not a layer number", expected="a decimal without leading zeros")
            continue
        if file is not None and not _is_plain(file):
            entry.refuse("file", "not a plain file name", expected="a name in this directory", found=repr(file))
        elif file is not None and file in files:
            entry.refuse("file", "file belongs to two layers", found=repr(file))
        if digest is not None and _SHA256.fullmatch(digest) is None:
            entry.refuse(
                "sha256", "not a SHA-256", expected="64 lower-case hexadecimal digits", found=repr(digest[:80])
            )
        if file is not None and digest is not None:
            files.add(file)
            layers.append(SlotLayer(index=int(key), file=file, sha256=digest))
    if geometry is not None and section.is_mapping:
        keys = {key for key in section.keys() if _LAYER_KEY.fullmatch(key)}  # noqa: SIM118 - a section is no mapping
        declared = {str(layer) for layer in geometry.moe_layer_indices}
        for key in sorted(declared - keys, key=int):
            section.refuse(key, "layer is declared and has no file")
        for key in sorted(keys - declared, key=int):
            section.refuse(key, "layer is not declared in moe_layer_indices")
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _is_plain(name: str) -> bool:
    return (
        0 < len(name.encode(errors="replace")) <= _LONGEST_FILE_NAME
        and name not in {".", ".."}
        and name.isprintable()
        and not set("/\\:") & set(name)
    )
