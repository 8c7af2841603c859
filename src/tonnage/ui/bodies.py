"""What is asked over HTTP, as strict structs: fields are named as the options of the command line.

Only shapes and plain ranges are checked here; what an option means is read by :mod:`tonnage.plan_options`, as it is for
the command line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tonnage.api import Convert
from tonnage.topology import MOST_RANKS

LOG_LIMIT_CHARACTERS = 8 << 20
MOST_NUMBER = (1 << 53) - 1
"""Beyond it a number of JavaScript is no longer exact."""

_Ranks = Meta(ge=1, le=MOST_RANKS)
_Text = Meta(min_length=1, max_length=200)
_Count = Meta(ge=1, le=MOST_NUMBER)

Size = Annotated[str, Meta(min_length=1, max_length=64, description="A size with its unit.", examples=["94.010GiB"])]
Name = Annotated[str, _Text]
Share = Annotated[str, _Text, Meta(description="The share of the GPU that vLLM is started with.", examples=["0.92"])]
Method = Literal["eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark", "draft-model", "ngram", "suffix"]
AnyEngine = Literal["vllm", "sglang", "exllamav3", "split"]
RealEngine = Literal["vllm", "sglang", "exllamav3"]


class Address(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a checkpoint is: exactly one of path, hub and config.

    Attributes:
        path: As ``/api/checkpoints`` lists it.
        hub: A repository of the hub.
        config: config.json: its text, or the object it holds.
        name: What to call a config.
    """

    path: Annotated[str, Meta(min_length=1, max_length=4096)] | UnsetType = UNSET
    hub: Annotated[str, Meta(min_length=1, max_length=300, examples=["Qwen/Qwen3-8B"])] | UnsetType = UNSET
    config: dict[str, Any] | str | UnsetType = UNSET
    name: Name | UnsetType = UNSET


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every question says of how a checkpoint is served; the command line has an option of the same name.

    Attributes:
        checkpoint: What is planned.
    """

    checkpoint: Address
    pp: Annotated[int, _Ranks] = 1
    dcp: Annotated[int, _Ranks] = 1
    gpu: Annotated[str, _Text, Meta(description="A name of /api/gpus.", examples=["h100"])] | None = None
    supply: Size | None = None
    free: (
        Annotated[str, _Text, Meta(description="Free memory of the server's own GPUs: all, or such as 0,2.")] | None
    ) = None
    utilization: Share | None = None
    reserve: Size = "0"
    kv_dtype: Name | None = None
    kv_bytes: Size | None = None
    engine_version: Annotated[str, _Text, Meta(examples=["0.33.0"])] | None = None
    eager: bool = False
    draft: Address | None = None
    draft_method: Method | None = None
    draft_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    draft_bytes: Size = "0"
    convert: Convert = "none"


class PlanBody(Options, kw_only=True, forbid_unknown_fields=True):
    """A question for a plan."""

    tp: Annotated[int, _Ranks] = 1
    ep: Annotated[int, _Ranks] = 1
    engine: AnyEngine = "split"
    profile: Annotated[str, _Text, Meta(examples=["c4-p4096"])] | None = None
    context: Annotated[int, _Count] | None = None
    estimator: Literal["exact", "credit"] = "exact"
    credit_permille: Annotated[int, Meta(ge=0, le=1000)] | None = None
    calibration: Annotated[str, _Text, Meta(description="A name out of `tonnage calibrations`.")] | None = None
    device_bytes: Annotated[int, _Count] | None = None
    growth: Annotated[bool, Meta(description="Say how the cache grows with context and concurrency.")] = True
    suggestions: Annotated[
        bool, Meta(description="Look for the smallest changes that would fit, where it does not; takes longer.")
    ] = False


class RegionsBody(PlanBody, kw_only=True, forbid_unknown_fields=True):
    """A question for the contexts and concurrencies that fit."""

    most_context: Annotated[int, _Count, Meta(description="The model's own by default.")] | None = None
    most_concurrency: Annotated[int, Meta(ge=1, le=4096)] = 256
    steps: Annotated[int, Meta(ge=1, le=4, description="Points of the grid per doubling of the context.")] = 1


class FitBody(Options, kw_only=True, forbid_unknown_fields=True):
    """A question for every way to share a model that there is room for."""

    tp: Annotated[int, _Ranks] | None = None
    ep: Annotated[int, _Ranks] | None = None
    gpus: Annotated[int, _Ranks] | None = None
    engine: AnyEngine = "vllm"
    profile: Annotated[str, _Text, Meta(examples=["c4-p4096"])] = "c1-p4096"
    context: Annotated[int, _Count] | None = None


class FlagsBody(Options, kw_only=True, forbid_unknown_fields=True):
    """A question for the launch command of a plan that fits."""

    engine: RealEngine
    profile: Annotated[str, _Text, Meta(examples=["c4-p4096"])]
    context: Annotated[int, _Count]
    tp: Annotated[int, _Ranks] = 1
    ep: Annotated[int, _Ranks] = 1
    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    quantization: Name | None = None


class ObserveBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A log, and the plan it is held against.

    Attributes:
        log: The start-up log of an engine.
        plan: The answer of ``/api/plan``.
        gpu: A name of ``/api/gpus``: logs do not say it.
    """

    log: Annotated[str, Meta(max_length=LOG_LIMIT_CHARACTERS)]
    plan: dict[str, Any] | None = None
    gpu: Name | None = None
