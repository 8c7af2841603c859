"""Rotary tables: cosines and sines of every position, one buffer for every distinct rotation a model builds.

The figure an engine logs as weights holds them. Their length is that of the trained context, not of the one served.

Source:
    vLLM 0.32.0 ``model_executor/layers/rotary_embedding`` (``get_rope`` and one file per scaling) and the ``get_rope``
    calls of its models; SGLang 0.5.23 keeps the tables of CUDA devices in F32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

from tonnage.memory.term import Term

if TYPE_CHECKING:
    from tonnage.checkpoint.config import ModelConfig

COMPONENT = "engine.rotary"
MOST = 1 << 32
"""No length, width or factor beyond this is believed."""
MROPE_POSITIONS = 4
MROPE_EXACT_SINCE = (0, 32)
WITHOUT = frozenset({"nemotron_h", "kimi_linear", "kimi_k3", "kimi_k31"})
"""Families whose attention has no rotation."""
MULTI_AXIS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families with positions in time, height and width, whether their config says so or not."""
SINGLE_PRECISION = frozenset({"gpt_oss"})
TEXT_SCOPES = ("text_config", "llm_config", "language_config")
DEFAULT_POSITIONS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """One buffer ``[positions, width]``, cosines and sines side by side.

    Attributes:
        positions: Rows it is expected to have.
        most_positions: Rows it has at most.
        width: Rotated elements of a head.
        element_bytes: Bytes of an element.
        most_element_bytes: Bytes of an element at most.
    """

    positions: int
    most_positions: int
    width: int
    element_bytes: int
    most_element_bytes: int

    @property
    def nbytes(self) -> int:
        """Expected bytes."""
        return self.positions * self.width * self.element_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes at most."""
        return self.most_positions * self.width * self.most_element_bytes


def rotary_line(config: ModelConfig, *, engine: str, version: tuple[int, ...] | None) -> Iterator[Term]:
    """Yield the line of all tables of a model; none where its attention has no rotation."""
    tables = rotary_tables(config, engine=engine, version=version)
    if tables:
        shapes = ", ".join(f"{t.positions} x {t.width} of {t.element_bytes} bytes" for t in tables)
        yield Term(
            component=COMPONENT,
            nbytes=sum(table.nbytes for table in tables),
            bound_nbytes=sum(table.most_bytes for table in tables),
            basis="exact" if all(table.nbytes == table.most_bytes for table in tables) else "modelled",
            source=f"cos and sin tables: {shapes} ({engine} rotary_embedding)",
        )


def rotary_tables(
    config: ModelConfig, *, engine: str = "vllm", version: tuple[int, ...] | None = None
) -> tuple[RotaryTable, ...]:
    """Return the tables a model builds on every rank.

    Args:
        config: The model's config; fields of its text part go first.
        engine: ``vllm`` or ``sglang``.
        version: Release of the engine; ``None`` if it is not known.
    """
    fields = text_fields(config)
    family = _family(config, fields)
    if family in WITHOUT:
        return ()
    maker = _Maker(fields=fields, family=family, engine=engine, version=version, served_in_f32=config.dtype == "F32")
    return tuple(maker.tables())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    fields: Mapping[str, object]
    family: str
    engine: str
    version: tuple[int, ...] | None
    served_in_f32: bool

    def tables(self) -> Iterator[RotaryTable]:
        """Yield one table per distinct rotation."""
        rope = inner_object(self.fields, "rope_parameters") or inner_object(self.fields, "rope_scaling")
        nested = {kind: inner for kind, inner in rope.items() if isinstance(inner, dict)}
        if "compress_rope_theta" in self.fields:
            yield self._table({}, self._head_size, 4)
            yield self._table({**rope, "rope_type": "deepseek_yarn"}, self._head_size, 4)
        elif nested:
            for kind, inner in nested.items():
                yield self._table(inner, self._size_of(kind), 0)
        else:
            yield from self._flat(rope)

    def _flat(self, rope: Mapping[str, object]) -> Iterator[RotaryTable]:
        table = self._table(rope, self._head_size, 0)
        yield table
        if "rope_local_base_freq" in self.fields or self.family.startswith("gemma3"):
            yield self._table({}, self._head_size, 0)
        if "index_head_dim" in self.fields or "index_topk" in self.fields:
            yield table  # the indexer rotates in the other order of elements

    @property
    def _head_size(self) -> int:
        latent = number(self.fields, "qk_rope_head_dim")
        if latent and ("kv_lora_rank" in self.fields or "compress_rope_theta" in self.fields):
            return latent
        heads = number(self.fields, "num_attention_heads") or 1
        hidden = number(self.fields, "hidden_size") or 0
        return number(self.fields, "head_dim") or number(self.fields, "attention_head_dim") or hidden // heads

    def _size_of(self, kind: str) -> int:
        wide = number(self.fields, "global_head_dim") if kind == "full_attention" else None
        return wide or self._head_size

    def _table(self, rope: Mapping[str, object], head_size: int, element_bytes: int) -> RotaryTable:
        kind = rope.get("rope_type", rope.get("type", "default"))
        trained = number(self.fields, "max_position_embeddings") or DEFAULT_POSITIONS
        original = number(rope, "original_max_position_embeddings") or trained
        factor = _fraction(rope, "factor") or Fraction(1)
        positions = trained
        if kind in ("yarn", "deepseek_yarn", "deepseek_llama_scaling"):
            positions = ceil(original * factor)
        elif kind in ("linear", "ntk"):
            positions = ceil(trained * factor)
        elif kind in ("longrope", "su"):
            positions = trained + (number(self.fields, "original_max_position_embeddings") or original)
        usual, most = self._multi_axis(rope)
        held, most_held = self._element_bytes(str(kind))
        return RotaryTable(
            positions=positions * usual,
            most_positions=positions * most,
            width=head_size if kind == "proportional" else self._width(rope, head_size),
            element_bytes=element_bytes or held,
            most_element_bytes=element_bytes or most_held,
        )

    def _width(self, rope: Mapping[str, object], head_size: int) -> int:
        stated = number(rope, "rope_dim") or number(self.fields, "rotary_dim")
        if stated:
            return min(stated, head_size)
        if number(self.fields, "qk_rope_head_dim") == head_size:
            return head_size
        part = _fraction(rope, "partial_rotary_factor") or _fraction(self.fields, "partial_rotary_factor")
        return int(head_size * part) if part and part <= 1 else head_size

    def _multi_axis(self, rope: Mapping[str, object]) -> tuple[int, int]:
        """Return by how much tables of positions on several axes are longer: expected, at most."""
        if "mrope_section" not in rope and not self.family.startswith(MULTI_AXIS):
            return 1, 1
        if self.engine == "sglang":
            return 1, MROPE_POSITIONS
        if self.version is not None and self.version >= MROPE_EXACT_SINCE:
            return (1, 1) if self.family.startswith(("qwen3_vl", "qwen3_5")) else (MROPE_POSITIONS, MROPE_POSITIONS)
        return MROPE_POSITIONS, MROPE_POSITIONS

    def _element_bytes(self, kind: str) -> tuple[int, int]:
        """Return expected and largest bytes of an element."""
        if self.engine == "sglang" or self.served_in_f32 or self.family in SINGLE_PRECISION:
            return 4, 4
        latent_yarn = kind in ("yarn", "deepseek_yarn") and "kv_lora_rank" in self.fields
        return (4, 4) if latent_yarn else (2, 2)


def text_fields(config: ModelConfig) -> Mapping[str, object]:
    """Return the fields of the language model."""
    for key in TEXT_SCOPES:
        if isinstance(config.fields.get(key), dict):
            return config.scope((key,))
    return config.fields


def _family(config: ModelConfig, fields: Mapping[str, object]) -> str:
    """Return the model type of the outer config, which names the engine's class, or else of the text part."""
    return config.model_type or str(fields.get("model_type", ""))


def inner_object(fields: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the object of a key; empty where there is none."""
    found = fields.get(key)
    return found if isinstance(found, dict) else {}


def number(fields: Mapping[str, object], key: str) -> int | None:
    """Return the number of a key; ``None`` where it says none above 0 that can be believed."""
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST else None


def _fraction(fields: Mapping[str, object], key: str) -> Fraction | None:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
        return None
    return Fraction(value)
