"""What is planned, and what is asked of a plan: the values that the calls of :mod:`tonnage.api` take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tonnage.assignment import Assignment
from tonnage.checkpoint.config import ModelConfig
from tonnage.checkpoint.io import CheckpointHeaders
from tonnage.errors import Problem, UnitError
from tonnage.memory.supply import Gpu, Supply
from tonnage.profile import Profile
from tonnage.sources.model import Source
from tonnage.topology import Device, Engine, Topology

if TYPE_CHECKING:
    from tonnage.calibrations.credit_records import CreditRecord
    from tonnage.draft import DraftMethod

Convert = Literal["none", "mxfp8", "mxfp8-experts"]
"""Of plain projections: none, those of attention and MLPs, or routed experts as well."""
Estimator = Literal["exact", "credit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, or the config of one, as read.

    Attributes:
        name: Directory or file name.
        digest: SHA-256 over shard names, sizes and headers; over config.json where there are no headers.
        assignment: Every tensor with role and storage format.
        headers: Validated headers; ``None`` if only a config was given.
        source: Where its files lie; ``None`` if it was made of a config in memory.
    """

    name: str
    digest: str
    assignment: Assignment
    headers: CheckpointHeaders | None
    source: Source | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.assignment.blueprint.config

    @property
    def family(self) -> str:
        """The recipe that answered."""
        return self.assignment.blueprint.recipe.family


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a plan.

    Attributes:
        tp: Tensor-parallel size; likewise ``ep``, ``pp``, ``dcp``.
        engine: Whose placement rules.
        supply: What one GPU supplies: ``supply_bytes(find_gpu("h100"))`` or ``parse_supply("80GiB")``; ``None`` asks
            only how much.
        reserve_bytes: Held per rank for everything outside the plan.
        convert: What preparation does to convertible weights.
        estimator: ``exact``, or ``credit`` for packages made elsewhere.
        credit_permille: The credit, assumed; without it a calibration is looked for.
        credit_record: The calibration to use, whatever it was fitted to.
        credit_records: Or those to choose from, see :func:`tonnage.calibrations.io.known_records`.
        device_bytes: Bytes of all ranks before the credit, draft included; by default stored payload + draft.
        draft: A draft checkpoint, placed like the target.
        draft_bytes: Or the bytes of one, taken to be cut evenly.
        draft_method: How tokens are drafted; that of the draft checkpoint if not given.
        draft_tokens: Tokens drafted per step; 1 if a draft is asked for and nothing is said.
        profile: What is served; with a context, a KV dtype or a name in it, an engine's cache and everything else a
            rank holds is planned too.
        gpu: The GPU, if it is one of the table.
        version: Of the engine.
        kv_bytes: What the cache is given per rank; by default what the profile needs.
        context_held: Whether the supply is that of a bare GPU, on which a process first makes its context.
        eager: No CUDA graphs.
        device: What the engine runs on; of what it holds on a CPU, weights and cache are planned.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dcp: int = 1
    engine: Engine = "split"
    supply: Supply | None = None
    reserve_bytes: int = 0
    convert: Convert = "none"
    estimator: Estimator = "exact"
    credit_permille: int | None = None
    credit_record: CreditRecord | None = None
    credit_records: tuple[CreditRecord, ...] = ()
    device_bytes: int | None = None
    draft: Checkpoint | None = None
    draft_bytes: int = 0
    draft_method: DraftMethod | None = None
    draft_tokens: int | None = None
    profile: Profile = field(default_factory=Profile)
    gpu: Gpu | None = None
    version: str | None = None
    kv_bytes: int | None = None
    context_held: bool = True
    eager: bool = False
    device: Device = "gpu"

    def __post_init__(self) -> None:
        """Refuse what contradicts itself or would be ignored.

        Raises:
            UnitError: Bytes are negative, a draft is given twice, or a credit without the credit estimator.
        """
        for name, nbytes in (("reserve", self.reserve_bytes), ("draft-bytes", self.draft_bytes)):
            if nbytes < 0:
                raise UnitError(Problem(where=f"--{name}", what="negative", expected="0 or more", found=str(nbytes)))
        if self.draft is not None and self.draft_bytes:
            raise UnitError(Problem(where="--draft, --draft-bytes", what="both given", expected="one of them"))
        if self.credit_permille is not None and self.credit_record is not None:
            raise UnitError(
                Problem(where="--credit-permille, --calibration", what="both given", expected="one of them")
            )
        if self.estimator == "exact" and (self.credit_permille, self.credit_record, self.device_bytes) != (None,) * 3:
            raise UnitError(
                Problem(
                    where="--credit-permille, --calibration, --device-bytes",
                    what="not used by the exact estimator",
                    expected="--estimator credit",
                )
            )

    @property
    def serves(self) -> bool:
        """Whether cache and buffers are planned: a profile is asked for, of an engine or else in full."""
        profile = self.profile
        asked = (profile.concurrency, profile.context_tokens, profile.kv_dtype)
        return self.estimator == "exact" and (
            all(asked[:2]) if self.engine == "split" else any(asked) or self.kv_bytes is not None
        )

    @property
    def topology(self) -> Topology:
        """The parallel sizes as a value."""
        return Topology(tp=self.tp, ep=self.ep, pp=self.pp, dcp=self.dcp)
