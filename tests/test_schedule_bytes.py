"""Schedules carried out in memory, and put together again: every family and storage format at least once.

The reader is the safetensors library; slices are found by the notes in the files' own metadata.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from tonnage.api import Checkpoint, open_checkpoint
from tonnage.assignment import convert_to_mxfp8
from tonnage.checkpoint.config import ModelConfig, parse_config
from tonnage.checkpoint.headers import parse_header
from tonnage.checkpoint.skeletons import ShardHeader
from tonnage.container import check_container
from tonnage.engines import engine
from tonnage.formats.exl3_v1_manifest import SlotManifest
from tonnage.placement import Placement, can_place, place
from tonnage.prepare.jobs import Schedule, Step, Take
from tonnage.prepare.layout import header_bytes
from tonnage.prepare.schedule import make_schedule
from tonnage.prepare.slots import slot_jobs
from tonnage.synth.io import RehearsalOptions, write_rehearsal
from tonnage.topology import Topology

DATA = Path(__file__).parent / "data"
JOB_BYTES = 1 << 20
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "F32": 32,
    "I32": 32,
    "I64": 64,
}


# --- carrying out -----------------------------------------------------------------------------------------------------


def words(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """The elements as unsigned integers."""
    return np.frombuffer(raw, f"u{BITS[dtype] // 8}").reshape(shape)


def cut(array: Any, take: Take) -> bytes:
    if take.axis is None:
        return bytes(array.tobytes()) + bytes(take.zero_bytes)
    before = (slice(None),) * take.axis
    parts = [array[(*before, slice(begin, end))] for begin, end in take.ranges] or [array[(*before, slice(0, 0))]]
    inner = prod(array.shape[take.axis + 1 :]) * array.itemsize
    zeros = (*array.shape[: take.axis], take.zero_bytes // inner, *array.shape[take.axis + 1 :])
    return bytes(np.concatenate([*parts, np.zeros(zeros, array.dtype)], axis=take.axis).tobytes())


def quantize(raw: Any, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """MXFP8 by the definition, in float64: the scale is the least power of two that brings the block within 448."""
    kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    blocks = np.frombuffer(raw, kind).astype(np.float64).reshape(shape[0], -1, 32)
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=2) / 448)
    scales = np.where(fraction == 0, 0, np.clip(127 + exponent - (fraction == 0.5), 0, 254)).astype(np.uint8)
    scaled = blocks * np.exp2(127.0 - scales)[:, :, None]
    codes = np.clip(scaled, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(shape).view(np.uint8), scales


def written(step: Step, raw: bytes) -> Iterator[tuple[Take, int, bytes]]:
    """Every take of a step with the offset and the bytes it stands for."""
    source = step.source
    if not step.convert:
        array = words(raw, source.dtype, source.shape)
        for take in step.takes:
            yield take, take.begin, cut(array, take)
        return
    codes, scales = quantize(raw, source.dtype, source.shape)
    for take in step.takes:
        assert take.scale_begin is not None
        per = 32 if take.axis == 1 else 1
        of_scales = tuple((begin // per, end // per) for begin, end in take.ranges)
        yield take, take.begin, cut(codes, take)
        yield take, take.scale_begin, cut(scales, Take(rank=take.rank, axis=take.axis, ranges=of_scales, begin=0))


def carry_out(schedule: Schedule, directory: Path) -> dict[tuple[int, str], bytes]:
    """Every output file by rank and path; each must come out from front to back."""
    files: dict[tuple[int, str], bytes] = {}
    for job in schedule.jobs:
        source = np.memmap(directory / job.source_file, np.uint8, "r")
        payloads = {output.rank: bytearray() for output in job.outputs}
        for step in job.steps:
            raw = source[step.source.begin : step.source.begin + step.source.nbytes].tobytes()
            for take, begin, piece in written(step, raw):
                assert len(payloads[take.rank]) == begin
                payloads[take.rank] += piece
        for output in job.outputs:
            assert len(payloads[output.rank]) == output.payload_bytes
            assert (output.rank, output.path) not in files
            files[output.rank, output.path] = header_bytes(output) + bytes(payloads[output.rank])
    return files


# --- putting together -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    rank: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    note: Any


def slices(files: dict[tuple[int, str], bytes]) -> dict[str, list[Slice]]:
    """Every tensor's slices by name, as the safetensors library reads them."""
    found: dict[str, list[Slice]] = {}
    for (rank, _), raw in files.items():
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        metadata = header.pop("__metadata__")
        order = sorted(header, key=lambda name: header[name]["data_offsets"])
        notes = dict(zip(order, json.loads(metadata.get("slices", "[]")) or [0] * len(order), strict=True))
        for name, facts in safetensors.deserialize(raw):
            begin = 8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]
            assert begin % (BITS[facts["dtype"]] // 8) == 0
            one = Slice(rank, facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]), notes[name])
            found.setdefault(name, []).append(one)
    return found


def put_together(parts: list[Slice]) -> tuple[str, tuple[int, ...], bytes]:
    """The whole tensor: every index is held by some rank, ranks that hold the same agree, padding is zero."""
    (dtype,) = {part.dtype for part in parts}
    if not parts[0].note:
        assert len({(part.shape, part.data) for part in parts}) == 1
        return dtype, parts[0].shape, parts[0].data
    axis, _, shape = parts[0].note
    whole = np.moveaxis(np.zeros(shape, f"u{BITS[dtype] // 8}"), axis, 0)
    held = np.zeros(shape[axis], bool)
    for part in parts:
        assert part.note[0] == axis
        assert part.note[2] == shape
        array, at = np.moveaxis(words(part.data, dtype, part.shape), axis, 0), 0
        for begin, end in part.note[1]:
            taken = array[at : at + end - begin]
            assert (whole[begin:end][held[begin:end]] == taken[held[begin:end]]).all()
            whole[begin:end], held[begin:end], at = taken, True, at + end - begin
        assert not array[at:].any()
    assert held.all()
    return dtype, tuple(shape), np.moveaxis(whole, 0, axis).tobytes()


def planned(placement: Placement) -> dict[tuple[int, str], int]:
    """Bytes of every tensor on every rank, straight from the placement's pieces."""
    found: dict[tuple[int, str], int] = {}
    topology = placement.topology
    for placed in placement.placed:
        entry, module = placed.entry, placed.entry.module
        rests = [(member,) for member in entry.members] if entry.members else list(product(*module.rest))
        for first in entry.first or (None,):
            stages = [pp for pp in range(topology.pp) if holds(placement, placed, first, pp)]
            for pp, tp_rank in product(stages, range(topology.tp)):
                share = placed.shares[tp_rank]
                mine = rests
                if placed.how == "whole experts" and not module.stack:
                    mine = [rest for rest in rests if rest[0] in range(*share.ranges[0])]
                for rest in mine if share.copies else []:
                    name = module.name(*(() if first is None else (first,)), *rest)
                    for stored, piece in zip(entry.stored, share.pieces, strict=True):
                        if piece.held_bytes:
                            found[pp * topology.tp + tp_rank, name + stored.suffix] = piece.held_bytes
    return found


def holds(placement: Placement, placed: Any, first: int | None, pp: int) -> bool:
    if placed.entry.module.layered and placed.stage == "layer":
        return first in placement.stages[pp]
    last = placement.topology.pp - 1
    return pp in {"first": {0}, "last": {last}, "ends": {0, last}, "all": set(range(last + 1))}[placed.stage]


def source_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, facts in safetensors.deserialize(file.read_bytes()):
            found[name] = facts["dtype"], tuple(facts["shape"]), bytes(facts["data"])
    return found


def expected_tensors(placement: Placement, directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the ranks must give when put together: the source, converted weights as codes and scales."""
    expected = source_tensors(directory)
    for placed in placement.placed:
        entry, module = placed.entry, placed.entry.module
        for indices in module.instances() if entry.converted_from else ():
            if entry.first and indices[0] not in entry.first:
                continue
            name = module.name(*indices)
            dtype, shape, raw = expected.pop(f"{name}.weight")
            codes, scales = quantize(raw, dtype, shape)
            expected[f"{name}.weight"] = "F8_E4M3", shape, codes.tobytes()
            expected[f"{name}.weight_scale"] = "U8", scales.shape, scales.tobytes()
        if placed.how == "absent":
            for indices, stored in product(module.instances(), entry.stored):
                expected.pop(module.name(*indices) + stored.suffix)
    return expected


def assert_written_as_planned(placement: Placement, checkpoint: Checkpoint, directory: Path) -> None:
    assert checkpoint.headers is not None
    schedule = make_schedule(placement, checkpoint.headers.shards, job_bytes=JOB_BYTES)
    files = carry_out(schedule, directory)
    found = slices(files)
    by_rank = {(part.rank, name): len(part.data) for name, parts in found.items() for part in parts}
    assert by_rank == planned(placement)
    tp, added = placement.topology.tp, sum(sum(extra.nbytes) for extra in placement.extras)
    for rank in range(placement.topology.world_size):
        total = sum(nbytes for (at, _), nbytes in by_rank.items() if at == rank)
        assert added or total == placement.rank_bytes(rank // tp, rank % tp)
    assert {name: put_together(parts) for name, parts in found.items()} == expected_tensors(placement, directory)


# --- every family and format ------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 301,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "dtype": "bfloat16",
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
STATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int pack": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}},
    "mxfp4": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": MXFP4}}},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "native mxfp8": {"quant_method": "mxfp8"},
}  # fmt: skip
FAMILIES = (
    "MiniMaxAI__MiniMax-M2.5",
    "MiniMaxAI__MiniMax-M3",
    "Qwen__Qwen3-0.6B",
    "Qwen__Qwen3-30B-A3B-FP8",
    "Qwen__Qwen3-VL-2B-Instruct",
    "nvidia__Qwen3.6-27B-NVFP4",
    "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
    "XiaomiMiMo__MiMo-7B-Base",
    "deepseek-ai__DeepSeek-V2-Lite",
    "deepseek-ai__DeepSeek-V3.2",
    "deepseek-ai__DeepSeek-V4-Flash",
    "google__gemma-4-26B-A4B",
    "mistralai__Mixtral-8x7B-v0.1",
    "moonshotai__Kimi-K2.5",
    "moonshotai__Kimi-K3",
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "openai__gpt-oss-20b",
)
INLINE: dict[str, dict[str, Any]] = {
    "phi3": {**LLAMA, "model_type": "phi3"},
    "granitemoe": {**LLAMA, "model_type": "granitemoe", "num_local_experts": 10, "tie_word_embeddings": True},
    "gemma2": {**LLAMA, "model_type": "gemma2"},
    "mixtral of 7": {**LLAMA, "model_type": "mixtral", "num_local_experts": 7},
}
TOPOLOGIES = tuple(
    Topology(tp=tp, ep=ep, pp=pp) for tp in (1, 2, 3, 4, 8) for ep in {1, tp} for pp in ((1, 2) if ep == 1 else (1,))
)


def config_of(name: str) -> ModelConfig:
    fields = json.loads((DATA / "configs" / f"{name}.json").read_text())
    return parse_config(fields, name=name, hf_quant=fields.get("_hf_quant_config"))


def rehearsed(config: ModelConfig, directory: Path, **how: Any) -> Checkpoint:
    write_rehearsal(config, directory, RehearsalOptions(**how))
    return open_checkpoint(directory)


def sampled(
    checkpoint: Checkpoint, *, seed: str, count: int, engines: tuple[str, ...] = ("split",)
) -> Iterator[Placement]:
    """Some placements of a checkpoint: conversion, topology and engine drawn from those that work."""
    chance = random.Random(seed)
    choices = list(product(engines, (True, False), TOPOLOGIES))
    chance.shuffle(choices)
    for name, convert, topology in choices:
        assignment = convert_to_mxfp8(checkpoint.assignment) if convert else checkpoint.assignment
        if topology.world_size > 1 and can_place(assignment, topology, engine(name)):
            yield place(assignment, topology, engine(name))
            count -= 1
            if not count:
                return


@pytest.mark.parametrize("stated", STATED)
def test_every_stated_format(stated: str, tmp_path: Path) -> None:
    fields = {**LLAMA, "quantization_config": STATED[stated]} if STATED[stated] else LLAMA
    checkpoint = rehearsed(parse_config(fields, name=stated), tmp_path / "c", scaled_down=True)
    for placement in sampled(checkpoint, seed=stated, count=4):
        assert_written_as_planned(placement, checkpoint, tmp_path / "c")


@pytest.mark.parametrize("storage", ["mxfp8", "exl3"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_every_written_format(storage: str, model_type: str, tmp_path: Path) -> None:
    fields = {**LLAMA, "model_type": model_type, "num_local_experts": 7}
    checkpoint = rehearsed(parse_config(fields, name="x"), tmp_path / "c", scaled_down=True, storage=storage)
    engines = ("split", "exllamav3") if storage == "exl3" else ("split",)
    for placement in sampled(checkpoint, seed=storage + model_type, count=4, engines=engines):
        assert_written_as_planned(placement, checkpoint, tmp_path / "c")


@pytest.mark.parametrize("family", [*FAMILIES, *INLINE])
def test_every_family(family: str, tmp_path: Path) -> None:
    config = parse_config(INLINE[family], name=family) if family in INLINE else config_of(family)
    checkpoint = rehearsed(config, tmp_path / "c", scaled_down=True)
    for placement in sampled(checkpoint, seed=family, count=1):
        assert_written_as_planned(placement, checkpoint, tmp_path / "c")


# --- EXL3 against a reference decoder ---------------------------------------------------------------------------------

VECTORS = json.loads((DATA / "exl3_slices.json").read_text())
TENSOR = VECTORS["tensor"]
SMALL_EXL3 = {
    **LLAMA,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
    "vocab_size": 256,
}


def states(trellis: Any) -> Any:
    """The 16-bit state of every position of every tile, K = 3."""
    low, high = trellis[..., 0::2].astype(np.uint32), trellis[..., 1::2].astype(np.uint32)
    bits = ((low | high << 16)[..., None] >> np.arange(31, -1, -1, dtype=np.uint32) & 1).reshape(*trellis.shape[:2], -1)
    ends = (np.arange(256) + 1) * 3
    at = (ends[:, None] - 16 + np.arange(16)) % bits.shape[-1]
    return (bits[..., at] << np.arange(15, -1, -1, dtype=np.uint32)).sum(axis=-1)


def mul1(state: Any) -> Any:
    """Codebook ``mul1``: one rounding to fp16, exact before."""
    product = (state.astype(np.uint64) * 0x83DCD12D) & 0xFFFFFFFF
    total = sum(product >> shift & 255 for shift in (0, 8, 16, 24))
    return ((1024.0 + total) * 0.00676727294921875 - 10.3828125).astype(np.float16)


def decoded(trellis: Any) -> Any:
    """The rotated matrix, exactly."""
    t = np.arange(256)
    row, column = (t & 1) + 2 * ((t >> 3) & 3) + 8 * ((t >> 1) & 1), (t >> 5) + 8 * ((t >> 2) & 1)
    tiles = np.empty((*trellis.shape[:2], 16, 16), np.float16)
    tiles[:, :, row, column] = mul1(states(trellis))
    return tiles.transpose(0, 2, 1, 3).reshape(trellis.shape[0] * 16, trellis.shape[1] * 16)


def sha256(raw: Any) -> str:
    return hashlib.sha256(raw if isinstance(raw, bytes) else raw.tobytes()).hexdigest()


def test_the_reference_decoder_is_right() -> None:
    trellis = np.frombuffer(bytes.fromhex(TENSOR["trellis_hex"]), "<u2").reshape(TENSOR["trellis_shape"])
    assert sha256(mul1(np.arange(1 << 16))) == VECTORS["mul1_table_sha256"]
    assert sha256(decoded(trellis)) == TENSOR["w_hat_sha256"]


def test_exl3_slices_are_the_published_ones_and_decode_to_slices(tmp_path: Path) -> None:
    fields = parse_config({**SMALL_EXL3, "num_hidden_layers": 1, "num_key_value_heads": 2}, name="x")
    checkpoint = rehearsed(fields, tmp_path / "c", scaled_down=False, storage="exl3", bits=Fraction(3))
    assert checkpoint.headers is not None
    (shard,) = checkpoint.headers.shards
    whole = {part: bytes.fromhex(TENSOR[f"{part}_hex"]) for part in ("trellis", "suh", "svh", "bias")}
    with (tmp_path / "c" / shard.shard_file).open("r+b") as stream:
        for tensor in shard.entries():
            module, _, part = tensor.name.rpartition(".")
            if module.endswith(("q_proj", "o_proj")) and part in whole:
                assert tensor.nbytes == len(whole[part])
                stream.seek(shard.data_begin + tensor.begin)
                stream.write(whole[part])
    placement = place(checkpoint.assignment, Topology(tp=2), engine("split"))
    found = slices(carry_out(make_schedule(placement, checkpoint.headers.shards), tmp_path / "c"))
    matrix = decoded(np.frombuffer(whole["trellis"], "<u2").reshape(TENSOR["trellis_shape"]))
    for module, axis in (("q_proj", "column"), ("o_proj", "row")):
        expected = [one for one in TENSOR["slices"] if one["kind"] == axis]
        for rank, one in enumerate(expected):
            mine = {
                name.rpartition(".")[2]: part
                for name, parts in found.items()
                for part in parts
                if part.rank == rank and f".{module}." in name
            }
            trellis = mine["trellis"]
            assert trellis.shape == tuple(one["trellis_shape"])
            for part in ("trellis", "suh", "svh"):
                assert sha256(mine[part].data) == one[f"{part}_sha256"]
            assert ("bias" in mine) == (one["bias_sha256"] is not None)
            assert "bias" not in mine or sha256(mine["bias"].data) == one["bias_sha256"]
            assert mine["mul1"].shape == ()
            weight = decoded(np.frombuffer(trellis.data, "<u2").reshape(trellis.shape))
            begin, end = one["range"]
            assert (weight == (matrix[:, begin:end] if axis == "column" else matrix[begin:end])).all()
            assert sha256(weight) == one["w_hat_sha256"]


# --- containers -------------------------------------------------------------------------------------------------------


def test_a_rank_of_a_container_is_again_a_valid_layer(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    checkpoint = rehearsed(config_of("moonshotai__Kimi-K3"), directory, scaled_down=True, experts="exl3-v1")
    container = checkpoint.assignment.container
    assert container is not None
    assert checkpoint.headers is not None
    placement = place(checkpoint.assignment, Topology(tp=2), engine("split"))
    files = carry_out(make_schedule(placement, checkpoint.headers.shards), directory)
    geometry, dialect = container.manifest.geometry, container.manifest.dialect
    for position, layer in enumerate(container.manifest.layers):
        whole = dict(safetensors.deserialize((directory / layer.file).read_bytes()))
        seen = np.zeros(geometry.num_slots, int)
        for rank in range(2):
            raw = files[rank, f"weights/tp2/rank-{rank}/{layer.file}"]
            header = parse_header(raw, file_bytes=len(raw), where=layer.file)
            first, count = int(header.metadata["first_slot"]), int(header.metadata["slot_count"])
            seen[first : first + count] += 1
            alone = replace(
                geometry, intermediate_size=32 * count, moe_layer_indices=(layer.index,), extent_barriers=()
            )
            shard = ShardHeader(
                shard_file=layer.file, layer=None, skeleton=header, data_begin=header.data_begin, file_bytes=len(raw)
            )
            manifest = SlotManifest(dialect=dialect, geometry=alone, layers=(layer,))
            assert check_container(manifest, [shard]).payload_bytes == placement.slots[position][rank]
            for name, facts in safetensors.deserialize(raw):
                array = words(whole[name]["data"], whole[name]["dtype"], tuple(whole[name]["shape"]))
                part = array[first : first + count] if name in ("codes", "rotations") else array
                assert bytes(facts["data"]) == part.tobytes()
        assert (seen == 1).all()


def test_the_experts_of_kimi_k31_over_eight_ranks(tmp_path: Path) -> None:
    checkpoint = rehearsed(config_of("Kimi-K3.1-Pro"), tmp_path / "c", experts="exl3-v1")
    assert checkpoint.headers is not None
    placement = place(checkpoint.assignment, Topology(tp=8), engine("split"))
    schedule = make_schedule(placement, checkpoint.headers.shards)
    experts, total = [0] * 8, [0] * 8
    for job in schedule.jobs:
        for output in job.outputs:
            total[output.rank] += output.payload_bytes
            experts[output.rank] += output.payload_bytes if "exl3-layer-" in output.path else 0
    assert experts == [85_277_635_072] * 8
    assert total == [placement.rank_bytes(0, rank) for rank in range(8)]


def test_the_slots_of_kimi_k31_over_ten_ranks(tmp_path: Path) -> None:
    """Its 96 heads cannot be cut over ten ranks; its container can."""
    checkpoint = rehearsed(config_of("Kimi-K3.1-Pro"), tmp_path / "c", experts="exl3-v1")
    container, headers = checkpoint.assignment.container, checkpoint.headers
    assert container is not None
    assert headers is not None
    norms = tuple(entry for entry in checkpoint.assignment.entries if entry.module.rule.role == "norm")
    topology = Topology(tp=10)
    placement = place(replace(checkpoint.assignment, entries=norms), topology, engine("split"))
    jobs = slot_jobs(placement, headers.shards)
    assert jobs is not None
    slots, nbytes = [0] * 10, [0] * 10
    for position in jobs.positions(range(10)):
        for output in jobs.job(position, position, range(10)).outputs:
            slots[output.rank] += int(dict(output.metadata)["slot_count"])
            nbytes[output.rank] += output.payload_bytes
    assert slots == [884, 884, 884, 884, 880, 884, 884, 884, 884, 880]
    assert (min(nbytes), max(nbytes)) == (67_975_344_640, 68_284_314_112)
