"""What planners are asked: every public log, and every model of which vLLM's own classes are known.

What a log does not tell is not asked. Why tonnage disagrees with a log is what ``docs/*-agreement.md`` say of it: the
reasons are those of ``scripts/*_agreement.py``, and there are no others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tonnage.api import read_config
from tonnage.checkpoint.config import ModelConfig
from tonnage.errors import TonnageError
from tonnage.synth.io import RehearsalOptions, write_rehearsal

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
GIB = 1 << 30

sys.path.insert(0, str(ROOT / "scripts"))
import kv_agreement  # noqa: E402 - a script is no package
import plan_agreement  # noqa: E402 - as above
import weights_agreement  # noqa: E402 - as above


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One log, as it is put to every peer.

    Attributes:
        question: The request, with the directory of the checkpoint.
        weights: Logged bytes of weights per rank.
        allocated: Bytes vLLM's own classes allocate for a rank.
        cache: Logged bytes that as many tokens take as one request may have, per rank.
        room: Logged bytes the cache had, per rank.
        ran: Whether the engine started; ``None`` where the log does not tell.
        reason: Why tonnage disagrees, if that is known.
        aside: Why the log tells nothing of one request's cache; such a case is counted and not asked.
    """

    question: Mapping[str, Any]
    weights: int | None = None
    allocated: int | None = None
    cache: float | None = None
    room: int | None = None
    ran: bool | None = None
    reason: str = ""
    aside: str = ""

    @property
    def log(self) -> str:
        """The name of the log."""
        return str(self.question["id"]).partition(" ")[2]


class Rehearsals:
    """Checkpoints of whole headers over sparse files, one per config, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        """Make them below this folder."""
        self._folder = folder
        self._made: dict[str, str] = {}

    def of(self, config: ModelConfig) -> str | None:
        """Return the directory of a config's checkpoint; ``None`` where no recipe describes it."""
        text = json.dumps([config.fields, config.hf_quant], sort_keys=True)
        if text not in self._made:
            self._made[text] = self._make(config)
        return self._made[text] or None

    def _make(self, config: ModelConfig) -> str:
        output = self._folder / f"{len(self._made)}"
        try:
            write_rehearsal(config, output, RehearsalOptions())
        except TonnageError as error:
            print(f"no rehearsal: {error}", file=sys.stderr)
            return ""
        return str(output)


def cases(made: Rehearsals) -> list[Case]:
    """Return every case there is a checkpoint for."""
    return [*weight_cases(made), *cache_cases(made), *class_cases(made)]


def weight_cases(made: Rehearsals) -> Iterator[Case]:
    """Yield the logs that print weights."""
    for row, checkpoint, request in plan_agreement.weighed():
        directory = made.of(checkpoint.config)
        if directory is None:
            continue
        total, share = row.get("gpu_mem_gib"), row.get("gpu_memory_utilization")
        asked = bool(total and share and row.get("max_model_len"))
        question = {
            "id": f"weights {row['id']}",
            "model": row["model"],
            "directory": directory,
            "engine": row["engine"],
            "version": request.version,
            "tp": request.tp,
            "pp": request.pp,
            "dcp": 1,
            "gpu": request.gpu.slug if request.gpu else None,
            "tokens": row.get("max_model_len") or 0,
            "max_batched_tokens": row.get("max_num_batched_tokens"),
            "gpu_bytes": int(Decimal(str(total)) * GIB) if asked else None,
            "utilization": float(share) if asked else None,
        }
        yield Case(
            question=question,
            weights=int(Decimal(row["weights_gib"]) * GIB),
            ran=True if asked else None,
            reason=weights_agreement.REASONS.get(row["id"], ""),
        )


def cache_cases(made: Rehearsals) -> Iterator[Case]:
    """Yield the logs of vLLM that print its cache, of models whose id is exact."""
    for row in plan_agreement.compared_caches():
        length = row.get("context_tokens")
        if not length or row.get("draft_tokens") or not row["exact"]:
            continue
        checkpoint = plan_agreement.cache_checkpoint(row)
        directory = made.of(checkpoint.config)
        if directory is None:
            continue
        cache, _ = kv_agreement.plan(row, checkpoint.assignment.blueprint)
        room = row["kv_gib"] * GIB
        needed = row["needed_gib"] * GIB if row.get("needed_gib") else room * length / row["kv_tokens"]
        question = {
            "id": f"cache {row['id']}",
            "model": row["model"],
            "directory": directory,
            "engine": "vllm",
            "version": row.get("version"),
            "tp": row["tp"],
            "pp": row["pp"],
            "dcp": row["dcp"],
            "tokens": length,
            "kv_dtype": row["kv_dtype"],
            "max_batched_tokens": row.get("max_batched_tokens"),
            "gpu_bytes": row["gpu_gib"] * GIB,
        }
        yield Case(
            question=question,
            cache=needed,
            room=round(room),
            ran=not kv_agreement.was_refused(row),
            reason=kv_agreement.REASONS.get(row["id"], "") or _kept_back(cache, length, needed),
            aside=_untold(cache, length) if not row.get("needed_gib") else "",
        )


def _kept_back(cache: kv_agreement.VllmCache, length: int, needed: float) -> str:
    """Return the reason of a cache whose smallest pool has one block more than the request."""
    close = abs(cache.request_bytes(length) - needed) * 100 <= needed
    mib = cache.bytes_per_block / 2**20
    return f"with the block of {mib:.1f} MiB that vLLM gives to no request; without: within 1 %" if close else ""


def _untold(cache: kv_agreement.VllmCache, length: int) -> str:
    """Return why tokens counted by blocks do not tell what a request takes: its groups hold unlike numbers of them."""
    if cache.options.counts != "blocks":
        return ""
    blocks = [group.blocks(length, cache.options) for group in cache.groups]
    uneven = max(blocks) - min(blocks) > 1
    return "prints blocks of one group of layers, of which groups hold unlike numbers" if uneven else ""


def class_cases(made: Rehearsals) -> Iterator[Case]:
    """Yield one model of every family of which vLLM's classes are known as published, on one rank and on eight."""
    oracle = json.loads((DATA / "vllm_oracle.json").read_text())
    chosen: dict[str, str] = {}
    for row in sorted((*oracle["first"], *oracle["more"]), key=lambda row: (row["config"], row["tp"])):
        plain = row["quant"] == "config" and not row["ep"] and row["pp"] == 1 and row["rank"] == 0
        if not plain or row["tp"] not in (1, 8):
            continue
        config = read_config(DATA / "configs" / f"{row['config']}.json")
        if chosen.setdefault(config.model_type, row["config"]) != row["config"]:
            continue
        directory = made.of(config)
        if directory is not None:
            yield Case(question=_class_question(row, directory), allocated=row["params_bytes"])


def _class_question(row: Mapping[str, Any], directory: str) -> dict[str, Any]:
    return {
        "id": f"classes {row['config']} tp{row['tp']}",
        "model": row["config"].replace("__", "/"),
        "directory": directory,
        "engine": "vllm",
        "tp": row["tp"],
        "pp": 1,
        "dcp": 1,
        "tokens": 0,
    }
