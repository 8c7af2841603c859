"""``tonnage compare``: errors of every tensor against ml_dtypes, in whichever form and over however many ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save_file

from packages import run
from samples import prepare_small, write_key
from tonnage.api import read_config
from tonnage.cli.compare import compare
from tonnage.compare.answers import Agreement
from tonnage.compare.comparison import Comparison, compare_models, comparison_document
from tonnage.compare.end_to_end import compare_answers
from tonnage.compare.figures import compare_values
from tonnage.compare.model import open_model
from tonnage.compare.subjects import Subject, subject_of
from tonnage.compare.texts import read_prompts, shipped_prompts, shipped_text, text_digest
from tonnage.compare.wholes import CompareError, put_together
from tonnage.compare.windows import stored_bits, windows
from tonnage.errors import TonnageError
from tonnage.prepare.reader import TensorView
from tonnage.report.compared import comparison_table
from tonnage.report.tables import render
from tonnage.synth.io import RehearsalOptions, write_rehearsal

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
Tensors = dict[str, np.ndarray]
BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
KINDS = {"BF16": BF16, "F8_E4M3": E4M3, "U8": np.uint8}
CONFIG = {"model_type": "llama", "hidden_size": 64, "vocab_size": 32}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint ``small`` and its forms: ``plain``, ``mxfp8`` (two ranks), ``hf``, ``modelopt`` (one)."""
    path = tmp_path_factory.mktemp("home")
    prepare_small(path / "small", path / "plain", convert="none")
    prepare_small(path / "small", path / "mxfp8")
    prepare_small(path / "small", path / "hf", tp=1, layout="hf")
    prepare_small(path / "small", path / "modelopt", tp=1, layout="hf", quant_style="modelopt")
    return path


def compared(a: Path, b: Path) -> Comparison:
    with open_model(a) as one, open_model(b) as other:
        return compare_models(one, other)


def load(folder: Path) -> Tensors:
    """Read a checkpoint with the safetensors library."""
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in deserialize(file.read_bytes()):
            found[name] = np.frombuffer(tensor["data"], KINDS[tensor["dtype"]]).reshape(tensor["shape"])
    return found


def decoded(tensors: Tensors, name: str) -> np.ndarray:
    scales = tensors[f"{name}_scale"].view(E8M0).astype(np.float64)
    return tensors[name].astype(np.float64) * np.repeat(scales, 32, axis=1)


def checkpoint(folder: Path, tensors: Tensors, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hf", "modelopt"])
def test_errors_of_a_conversion_are_those_ml_dtypes_gives(home: Path, form: str) -> None:
    source, written = load(home / "small"), load(home / form)
    found = compared(home / "small", home / form)

    assert len(found.errors) == len(source)
    assert {error.name for error in found.differing} == {name for name in source if f"{name}_scale" in written}
    squares = noise = 0.0
    for error in found.differing:
        expected = source[error.name].astype(np.float64)
        difference = expected - decoded(written, error.name)
        assert error.forms == ("BF16", "mxfp8_e4m3")
        assert error.sums.elements == expected.size
        assert error.sums.differing == np.count_nonzero(difference)
        assert error.sums.relative == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(expected), rel=1e-12)
        assert error.sums.largest_error == np.abs(difference).max()
        squares += np.square(expected).sum()
        noise += np.square(difference).sum()
    assert found.total.sqnr_db == pytest.approx(10 * np.log10(squares / noise), rel=1e-12)
    assert 30 < found.total.sqnr_db < 33


def test_errors_are_those_recorded_while_converting(home: Path) -> None:
    recorded = {one["tensor"]: one for one in json.loads((home / "mxfp8" / "prepare.json").read_bytes())["converted"]}
    found = compared(home / "small", home / "mxfp8")

    assert {error.name for error in found.differing} == recorded.keys()
    for error in found.differing:
        assert error.sums.relative == pytest.approx(recorded[error.name]["relative_error"], rel=1e-6)
        assert error.sums.largest_error == recorded[error.name]["largest_error"]


def test_ranks_put_together_give_the_figures_of_the_whole_to_the_last_bit(home: Path) -> None:
    ranks, whole = compared(home / "small", home / "mxfp8"), compared(home / "small", home / "hf")

    assert ranks.ranks == (1, 2)
    assert ranks.errors == whole.errors
    assert compared(home / "hf", home / "mxfp8").identical
    assert compared(home / "small", home / "plain").identical


def test_a_signed_package_is_read_like_what_it_was_made_of(home: Path, tmp_path: Path) -> None:
    package = shutil.copytree(home / "mxfp8", tmp_path / "package")
    private, _ = write_key(tmp_path)
    run("export", package, "--key", private)
    assert not (package / "prepare.json").exists()
    assert compared(home / "mxfp8", package).identical


def test_slots_of_a_container_are_put_together(tmp_path: Path, configs: Path) -> None:
    config = read_config(configs / "moonshotai__Kimi-K3.json")
    write_rehearsal(config, tmp_path / "k3", RehearsalOptions(scaled_down=True, experts="exl3-v1"))
    prepare_small(tmp_path / "k3", tmp_path / "ranks", convert="none")
    found = compared(tmp_path / "k3", tmp_path / "ranks")

    assert found.identical
    assert {error.forms for error in found.errors if error.name.endswith("/rotations")} == {("F16", "F16")}


def test_one_flipped_bit_is_one_differing_value(home: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(home / "small", tmp_path / "small")
    name = "model.layers.0.mlp.up_proj.weight"
    file = next(changed.glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    raw[8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0] + 1] ^= 0x80
    file.write_bytes(raw)
    first = float(load(home / "small")[name].flat[0])

    found = compared(home / "small", changed)

    (error,) = found.differing
    assert (error.name, error.sums.differing) == (name, 1)
    assert error.sums.largest_error == 2 * abs(first)
    assert found.worst == error


def test_sums_by_hand() -> None:
    inf, nan = np.inf, np.nan
    found = compare_values(np.array([[3.0, 4.0, nan, inf, 1.0]]), np.array([[3.0, 1.0, nan, -inf, nan]]))

    assert (found.elements, found.differing, found.nonfinite) == (5, 3, 3)
    assert (found.squares, found.error_squares, found.largest_error) == (25.0, 9.0, 3.0)
    assert found.relative == 0.6
    assert found.sqnr_db == pytest.approx(4.436974992327127)


def test_noise_without_a_signal_has_no_ratio() -> None:
    found = compare_values(np.zeros((1, 2)), np.ones((1, 2)))
    assert (found.relative, found.sqnr_db, found.largest_error) == (None, None, 1.0)
    same = compare_values(np.ones((1, 2)), np.ones((1, 2)))
    assert (same.relative, same.sqnr_db) == (0.0, None)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BF16])
def test_values_of_every_plain_dtype_are_those_of_numpy(tmp_path: Path, dtype: Any) -> None:
    values = np.random.default_rng(1).normal(size=(3, 5, 7))
    a = checkpoint(tmp_path / "a", {"w": values})
    b = checkpoint(tmp_path / "b", {"w": values.astype(dtype)})
    expected = np.linalg.norm(values - values.astype(dtype).astype(np.float64)) / np.linalg.norm(values)

    (error,) = compared(a, b).errors

    assert error.forms[0] == "F64"
    assert error.sums.relative == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("codes", "scales", "kind"),
    [
        ("w.weight", "w.weight_scale", np.uint8),
        ("w.weight", "w.weight_scale_inv", np.uint8),
        ("w.weight", "w.scale", E8M0),
        ("experts.w", "experts.w_scale", np.uint8),
    ],
)
def test_scales_are_found_under_every_name_they_are_stored_under(
    tmp_path: Path, codes: str, scales: str, kind: Any
) -> None:
    rng = np.random.default_rng(2)
    elements = rng.normal(size=(2, 4, 64)).astype(E4M3)
    powers = rng.integers(100, 150, (2, 4, 2), dtype=np.uint8)
    values = elements.astype(np.float64) * np.repeat(powers.view(E8M0).astype(np.float64), 32, axis=2)
    a = checkpoint(tmp_path / "a", {codes: values})
    b = checkpoint(tmp_path / "b", {codes: elements, scales: powers.view(kind)})

    (error,) = compared(a, b).errors

    assert error.identical
    assert error.forms == ("F64", "mxfp8_e4m3")


def test_what_has_no_values_is_compared_by_bytes_or_not_at_all(tmp_path: Path) -> None:
    words = np.arange(12, dtype=np.int32).reshape(3, 4)
    codes = np.ones((4, 64), E4M3)
    a = checkpoint(tmp_path / "a", {"table": words, "x.weight": codes, "y": words})
    b = checkpoint(tmp_path / "b", {"table": words ^ 0x0101, "x.weight": codes.astype(np.float32), "y": words})

    found = compared(a, b)

    assert [(error.name, error.differing_bytes) for error in found.errors] == [("table", 24), ("y", 0)]
    assert [(one.form, other.form) for one, other in found.incomparable] == [("F8_E4M3", "F32")]
    assert not found.identical


def test_tensors_of_one_side_are_named(tmp_path: Path) -> None:
    ones = np.ones((2, 32), np.float32)
    a = checkpoint(tmp_path / "a", {"w": ones, "head": ones})
    b = checkpoint(tmp_path / "b", {"w": ones, "bias": ones})

    found = compared(a, b)
    table = render(comparison_table(found))

    assert [[one.name for one in side] for side in (found.only_a, found.only_b)] == [["head"], ["bias"]]
    assert "only in A, 1: head" in table
    assert "only in B, 1: bias" in table
    assert not found.identical


# --- one model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({**CONFIG, "hidden_size": 32}, {"w": (2, 32)}, "hidden_size of config.json differs"),
        ({**CONFIG, "model_type": "qwen3"}, {"w": (2, 32)}, "model_type of config.json differs"),
        ({**CONFIG, "text_config": {"vocab_size": 9}}, {"w": (2, 32)}, "text_config.vocab_size of config.json"),
        (CONFIG, {"w": (4, 32)}, "a tensor has other dimensions"),
        (CONFIG, {"v": (2, 32)}, "no tensor in common"),
    ],
)
def test_two_models_are_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    nested = {**CONFIG, "text_config": {"vocab_size": 8}}
    a = checkpoint(tmp_path / "a", {"w": np.ones((2, 32), np.float32)}, nested)
    b = checkpoint(tmp_path / "b", {name: np.ones(shape, np.float32) for name, shape in tensors.items()}, config)
    with pytest.raises(CompareError, match=message):
        compared(a, b)


def test_what_a_config_says_of_storage_and_tokens_may_differ(tmp_path: Path) -> None:
    ones = np.ones((2, 32), np.float32)
    a = checkpoint(tmp_path / "a", {"w": ones}, {**CONFIG, "eos_token_id": 1, "torch_dtype": "float32"})
    quantized = {"eos_token_id": 2, "quantization_config": {"bits": 8}, "torch_dtype": "bfloat16", "use_cache": True}
    assert compared(a, checkpoint(tmp_path / "b", {"w": ones}, {**CONFIG, **quantized})).identical


# --- parts ------------------------------------------------------------------------------------------------------------


class Held(dict[str, np.ndarray]):
    """A rank that is only in memory."""

    directory = Path("rank")


def view(shape: tuple[int, ...], cut: Any = None, dtype: str = "I32") -> TensorView:
    return TensorView(file="f", name="w", dtype=dtype, shape=shape, begin=0, nbytes=0, cut=cut)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, dict[int, TensorView], dict[int, Held], int]:
    """A tensor, cut along any axis into runs that ranks hold in any order, some of them twice, with zeros behind."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    axis = draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[axis], *draw(st.lists(st.integers(0, shape[axis]), max_size=4))})
    owned: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(3)}
    for span in pairwise(edges):
        for rank in draw(st.sets(st.integers(0, 2), min_size=1)):
            owned[rank].append(span)
    parts, held = {}, {}
    for rank, spans in owned.items():
        padding = draw(st.integers(0, 2))
        taken = [np.take(whole, range(*span), axis) for span in spans]
        zeros = np.zeros((*shape[:axis], padding, *shape[axis + 1 :]), np.int32)
        held[rank] = Held(w=np.concatenate([*taken, zeros], axis))
        parts[rank] = view(held[rank]["w"].shape, (axis, tuple(spans), shape))
    return whole, parts, held, draw(st.integers(32, 64))


@given(cut_tensors())
def test_windows_of_parts_are_windows_of_the_whole(
    case: tuple[np.ndarray, dict[int, TensorView], dict[int, Held], int],
) -> None:
    whole, parts, held, elements = case
    found = put_together("w", parts, where="here")
    again = np.full((1,) * (2 - whole.ndim) + whole.shape, -1, np.int32)
    for window in windows(whole.shape, elements=elements):
        bits = stored_bits(found, held, window)
        assert bits.size <= elements
        assert (again[window.index] == -1).all()
        again[window.index] = bits.view(np.int32)
    assert np.array_equal(again.reshape(whole.shape), whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({0: view((2, 4), (0, ((0, 2),), (4, 4)))}, "no rank holds index 2"),
        ({0: view((2, 4), (0, ((2, 4),), (4, 4)))}, "no rank holds index 0"),
        ({0: view((2, 4)), 1: view((3, 4))}, "make no whole"),
        ({0: view((2, 4)), 1: view((2, 4), dtype="U32")}, "make no whole"),
        ({0: view((2, 4), (0, ((0, 2),), (4, 4))), 1: view((4, 2), (1, ((2, 4),), (4, 4)))}, "make no whole"),
    ],
)
def test_parts_that_make_no_whole_are_refused(parts: dict[int, TensorView], message: str) -> None:
    with pytest.raises(CompareError, match=message):
        put_together("w", parts, where="here")


def test_a_missing_rank_is_refused(home: Path, tmp_path: Path) -> None:
    halved = shutil.copytree(home / "plain", tmp_path / "plain")
    shutil.rmtree(halved / "weights" / "tp2" / "rank-1")
    with pytest.raises(CompareError, match="no rank holds index"):
        compared(home / "small", halved)


def test_copies_that_differ_are_refused(home: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(home / "plain", tmp_path / "plain")
    file = next((changed / "weights" / "tp2" / "rank-1").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    raw[8 + size + json.loads(raw[8 : 8 + size])["model.norm.weight"]["data_offsets"][0]] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CompareError, match=r"model\.norm\.weight: ranks hold different copies"):
        compared(home / "small", changed)


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    wide = np.ones((8192, 4096), BF16)
    a, b = checkpoint(tmp_path / "a", {"w": wide}), checkpoint(tmp_path / "b", {"w": wide * BF16(1.5)})
    del wide
    tracemalloc.start()
    try:
        (error,) = compared(a, b).errors
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.sums.relative == 0.5
    assert peak < 24 << 20  # the tensor alone has 64 MiB


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_document_of_the_command(tonnage: Tonnage, home: Path) -> None:
    done = tonnage("compare", home / "small", home / "mxfp8", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document == json.loads(json.dumps(comparison_document(compared(home / "small", home / "mxfp8"))))
    assert document["schema"] == "tonnage.compare/1"
    summary = json.loads((home / "mxfp8" / "prepare.json").read_bytes())
    lines = [f"{file['sha256']} {file['path']}\n" for rank in summary["ranks"] for file in rank["files"]]
    digest = hashlib.sha256("".join(sorted(lines, key=lambda line: line[65:])).encode()).hexdigest()
    assert document["a"] == {
        "name": "small", "ranks": 1, "of": "checkpoint", "digest": summary["identity"]["checkpoint"]
    }  # fmt: skip
    assert document["b"] == {"name": "mxfp8", "ranks": 2, "of": "prepared", "digest": digest}
    assert document["tensors"] == {"compared": 12, "differing": 7, "incomparable": 0, "only_a": 0, "only_b": 0}
    assert document["end_to_end"] is None


def test_a_package_is_the_weights_that_were_prepared(home: Path, tmp_path: Path) -> None:
    package = shutil.copytree(home / "mxfp8", tmp_path / "package")
    before = subject_of(package)
    run("export", package, "--key", write_key(tmp_path)[0], "--hash", "sha256")
    assert subject_of(package) == before
    assert subject_of(home / "hf") != before
    assert subject_of(checkpoint(tmp_path / "strange", {"a": np.zeros(4, BF16)}, {"model_type": "none"})) == Subject()


def test_a_record_is_the_document_and_never_written_over(tonnage: Tonnage, home: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    words = ("compare", home / "small", home / "mxfp8", "--save", record)
    done = tonnage(*words, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, json.loads(record.read_bytes()))
    assert tonnage(*words).returncode == 0  # the same once more
    record.write_text("{}")
    assert tonnage(*words).returncode == 2
    assert tonnage(*words, "--force").returncode == 0


def test_the_table_names_the_worst_tensor_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(home / "small", home / "mxfp8", end_to_end=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A small (1 rank) · B mxfp8 (2 ranks)"
    assert lines[3].startswith(compared(home / "small", home / "mxfp8").worst.name)


def test_the_example_of_the_help_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Example: tonnage compare checkpoint prepared --json" in (compare.__doc__ or "")
    compare(home / "small", home / "plain", end_to_end=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["identical"] is True


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_what_is_no_model_is_refused_in_one_line(home: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TonnageError) as refused:
        compare(home / "small", tmp_path / folder, end_to_end=False, prompts=None, as_json=False)
    assert len(str(refused.value).splitlines()) == 1


def test_end_to_end_without_torch_says_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        open_model(home / "small") as model,
        pytest.raises(CompareError, match=r"pip install 'tonnage\[torch\]'"),
    ):
        compare_answers(model, model, ["a"])


@pytest.mark.parametrize(("raw", "message"), [(b"", "found 0"), (b"\n \n", "found 0"), (b"\xff", "UTF-8")])
def test_prompts_that_are_none_are_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "prompts").write_bytes(raw)
    with pytest.raises(TonnageError, match=message):
        read_prompts(tmp_path / "prompts")


def test_prompts_are_lines_that_are_not_blank(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\n\n two \n")
    assert read_prompts(tmp_path / "prompts") == ("one", " two ")
    assert len(shipped_prompts()) == 8


def test_the_text_is_the_one_figures_are_known_for() -> None:
    assert 690 < len(shipped_text().split()) < 710
    assert text_digest() == "d7ee03c295c8065d075d1a5494d53b0bedf19975db81fc27d4473d0cfe2600a9"


def test_agreement_adds_up_by_positions() -> None:
    first = Agreement(positions=1, agreeing=1, kl_sum=0.5, kl_largest=0.5, nll=(np.log(2), np.log(4)))
    second = Agreement(positions=1, agreeing=0, kl_sum=0.25, kl_largest=0.25, nll=(np.log(8), np.log(4)))
    both = first + second
    assert (both.top1, both.kl_mean, both.kl_largest) == (0.5, 0.375, 0.5)
    assert both.perplexities == pytest.approx((4.0, 4.0))
