"""Parsers of texts: logs of engines, and the words of the command line."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz.mutate import PART, in_parts, json_document, text_lines, words
from fuzz.target import DATA, SEEDS, Target, each, files, parts, written
from tonnage.export.manifest import is_package_path
from tonnage.memory.devices import DeviceMemory, select_devices
from tonnage.memory.supply import find_gpu, gpu_of_driver, parse_supply, supply_bytes
from tonnage.observe.compare import compare, topology_mismatch
from tonnage.observe.io import LogFile, Observed, observe_blocks, read_plan
from tonnage.observe.record import row
from tonnage.prepare.output_dir import path_within
from tonnage.profile import parse_profile
from tonnage.report.observation import excesses, observe_document
from tonnage.units import gib, mib, parse_number, parse_size

_BLOCK = 997


def log(raw: bytes) -> None:
    """Read the log of an engine in blocks of two sizes, and hold it against a plan."""
    text, _, plan_raw = raw.partition(PART)
    observation = observe_blocks(iter([text]))
    assert observation == observe_blocks(text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))
    if observation is None:
        return
    assert all(one.isprintable() for one in (*observation.refusals, *observation.notes))
    row(observation)
    plan = comparisons = None
    if plan_raw:
        plan = read_plan(written("plan.json", plan_raw))
        if topology_mismatch(observation, plan) is None:
            comparisons = compare(observation, plan)
    observed = Observed(
        observation=observation, log=LogFile(nbytes=len(text), sha256=""), plan=plan, comparisons=comparisons or ()
    )
    excesses(observed)
    json.dumps(observe_document(observed)).encode()


def command_words(raw: bytes) -> None:
    """Read one text as everything the command line may be told: sizes, GPUs, profiles, devices, paths."""
    text = raw.decode("utf-8", "surrogateescape")
    each(lambda read: read(text), _READERS)


def _size(text: str) -> None:
    nbytes = parse_size(text)
    assert nbytes >= 0
    assert gib(nbytes)
    assert mib(nbytes)


def _path(text: str) -> None:
    root = Path("/root-of-nothing")
    if is_package_path(text):
        assert root in (root / text).parents
    found = path_within(root, text)
    assert root in found.parents
    assert ".." not in found.parts


_DEVICES = tuple(
    DeviceMemory(index=number, uuid=f"GPU-{number}a", name="NVIDIA H100", total_bytes=1 << 36, free_bytes=1 << 35, reserved_bytes=None)
    for number in range(2)
)  # fmt: skip
_READERS = (
    _size, _path, parse_number, parse_supply, parse_profile, lambda text: supply_bytes(find_gpu(text)),
    lambda text: gpu_of_driver(text, 1 << 36), lambda text: select_devices(_DEVICES, text, where="--free"),
)  # fmt: skip
_WORDS = ("94.010GiB", "96GB", "1048576", "0", "1 TiB", "rtx-pro-6000", "h100", "H100 80GB", "NVIDIA GB10", "c4-p4096", "c1-p1", "0,1",
          "GPU-0a", "0.92", "1e9", "weights/tp2/rank-0/model.safetensors", "../a", "a/b", ".prepare/journal")  # fmt: skip


def _logs() -> list[bytes]:
    return [
        *files(DATA / "logs", "*.log"),
        *(parts(one, files(SEEDS / "package_documents")[0]) for one in files(DATA / "logs", "vllm*tp2*")),
    ]


TARGETS = (
    Target(run=log, mutate=in_parts(text_lines, json_document), seeds=_logs, longest=1 << 16),
    Target(run=command_words, mutate=words(*_WORDS), seeds=lambda: [one.encode() for one in _WORDS], longest=512),
)
