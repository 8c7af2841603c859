"""What ``prepare --layout hf`` writes is a checkpoint like any other: inspected and planned from its own headers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tonnage import PlanRequest, open_checkpoint, open_rank, plan_checkpoint
from tonnage.api import read_config
from tonnage.errors import CheckpointError
from tonnage.synth.io import RehearsalOptions, write_rehearsal

CONFIGS = Path(__file__).resolve().parent / "data" / "configs"
ALL = "mxfp8-experts"
STYLES = [
    ("Qwen__Qwen3-8B", "compressed-tensors", "mxfp8"),
    ("Qwen__Qwen3-8B", "modelopt", "mxfp8"),
    ("Qwen__Qwen3-8B", "mxfp8", "mxfp8"),
    ("Qwen__Qwen3.5-35B-A3B", "compressed-tensors", "mxfp8"),
    ("Qwen__Qwen3.5-35B-A3B", "modelopt", "mxfp8"),
    ("Qwen__Qwen3-VL-235B-A22B-Instruct", "compressed-tensors", "mxfp8"),
    ("moonshotai__Kimi-K2.5", "compressed-tensors", "mxfp8"),
    ("Qwen__Qwen3-30B-A3B", "mxfp8", "mxfp8"),
    ("Qwen__Qwen3-30B-A3B", "compressed-tensors", ALL),
    ("Qwen__Qwen3-30B-A3B", "modelopt", ALL),
    ("Qwen__Qwen3-30B-A3B", "mxfp8", ALL),
    ("mistralai__Mixtral-8x7B-v0.1", "compressed-tensors", ALL),
]


@pytest.mark.parametrize(("name", "style", "convert"), STYLES)
def test_converted_checkpoint_is_inspected_without_a_word(tonnage, tmp_path, name, style, convert):
    source, output = tmp_path / "source", tmp_path / "output"
    write_rehearsal(read_config(CONFIGS / f"{name}.json"), source, RehearsalOptions(scaled_down=True))
    words = ("prepare", source, "--layout", "hf", "--convert", convert, "--quant-style", style, "-o", output)
    done = tonnage(*words)
    assert done.returncode == 0, done.stderr
    written = open_checkpoint(output)
    assert [note for note in written.assignment.notes if "config states" in note] == []
    planned = plan_checkpoint(open_checkpoint(source), PlanRequest(convert=convert)).ranks[0].weights_bytes
    assert written.assignment.payload_bytes == planned
    assert "mxfp8_e4m3" in {entry.fmt.name for entry in written.assignment.entries}


def test_rank_of_an_unfinished_preparation_is_not_opened(tonnage, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    write_rehearsal(read_config(CONFIGS / "Qwen__Qwen3-8B.json"), source, RehearsalOptions(scaled_down=True))
    assert tonnage("prepare", source, "--tp", "2", "-o", output).returncode == 0
    with open_rank(output, 1) as rank:
        assert rank.payload_bytes == plan_checkpoint(open_checkpoint(source), PlanRequest(tp=2)).ranks[1].weights_bytes
    shutil.move(output / "prepare.json", tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="not complete"):
        open_rank(output, 1)
