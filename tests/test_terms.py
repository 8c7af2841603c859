"""Calibrated records: never under their evidence, wider outside it, and fitted anew to the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from statistics import median

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from samples import load_script
from tonnage.calibrations.term_records import read_terms, shipped_file, shipped_terms, write_terms
from tonnage.cli.fit_terms import fit_terms, read_logs, with_model
from tonnage.errors import CheckpointError
from tonnage.fit_terms import ENOUGH, fit_files, fit_records
from tonnage.memory.runtime import runtime_terms
from tonnage.memory.term import Term
from tonnage.memory.terms import (
    Case,
    LogEvidence,
    TermFile,
    TermRecord,
    calibrated,
    case_of,
    find_record,
    in_total,
    scaled_up,
)
from tonnage.memory.workspace_shape import Deployment
from tonnage.term_evidence import LogRow, Seen, class_of_name, consumed_gib, logged, refused, seen_in
from tonnage.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
CASE = Case(term="graphs", engine="vllm", release=(0, 30), gpu_class="hopper", ranks=2, kind="dense")


def record(**changes: object) -> TermRecord:
    facts: dict[str, object] = {
        "term": "graphs", "engine": "vllm", "expected_permille": 1000, "bound_permille": 1200, "evidence": ("a",),
        "smallest_bytes": 1 << 30, "largest_bytes": 2 << 30,
    }  # fmt: skip
    return TermRecord(**{**facts, **changes})  # type: ignore[arg-type]


def seen(measured: int, *, model: str = "m", stated: bool = True, case: Case = CASE) -> Seen:
    evidence = LogEvidence(
        term=case.term, id=f"{model}-{measured}", source="s", measured_bytes=measured, predicted_bytes=1000
    )
    return Seen(case=case, evidence=evidence, model=model, stated=stated)


@pytest.fixture(scope="module")
def agreement():
    return load_script("runtime_agreement")


def test_shipped_records_are_what_the_command_fits(agreement, tmp_path: Path):
    logs = tmp_path / "logs.jsonl"
    logs.write_bytes(b"\n".join(agreement.lines()))
    app = typer.Typer()
    app.command()(fit_terms)
    done = CliRunner().invoke(app, [str(logs), "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["logs"] == 65
    assert [line.split(":")[0] for line in answer["left_out"]] == [
        "meta-llama-3-8b-vllm-tp1-284", "meta-llama-3-8b-vllm-tp2-285", "llama-3.1-8b-instruct-vllm-tp1-287",
    ]  # fmt: skip
    shipped = ROOT / "src" / "tonnage" / "calibrations" / "terms"
    for engine in answer["records"]:
        assert (tmp_path / "out" / f"{engine}.json").read_bytes() == (shipped / f"{engine}.json").read_bytes()


def test_totals_beside_the_cache_agree_with_the_logs(agreement):
    shipped, held_back = agreement.shipped_rows(), agreement.held_back_rows()
    assert len(shipped) >= 57
    assert len(held_back) >= 20
    for rows in (shipped, held_back):
        assert [row.id for row in rows if row.bound < row.measured] == []
        errors = [abs(row.error_permille) for row in rows]
        assert max(errors) <= 100
        assert median(errors) <= 40
    assert (ROOT / "docs" / "runtime-agreement.md").read_text() == agreement.report(shipped, held_back)


def test_budgets_of_logs_no_record_was_fitted_to(agreement):
    """Before 0.21, and without graphs, total x utilization - weights - cache is activations and other memory."""
    for line in agreement.lines("budget"):
        log = with_model(msgspec.json.decode(line, type=LogRow), None)
        row = log.row
        left = row.gpu_mem_gib * row.gpu_memory_utilization - row.weights_gib_per_gpu - row.kv_available_gib
        terms = runtime_terms(log.shape, log.serving, log.deployment, shipped_terms("vllm"))
        beside = [term for term in terms if term.component not in {"runtime.context", "runtime.graphs"}]
        expected, bound = (
            sum(getattr(term, name) for term in beside) / (1 << 30) for name in ("nbytes", "bound_nbytes")
        )
        assert abs(expected - float(left)) < 0.25
        assert float(left) <= bound


def test_bounds_are_not_absurd(agreement):
    over = [(row.bound - row.measured) / row.measured for row in agreement.shipped_rows()]
    assert median(over) <= 0.06
    assert max(over) <= 0.35


def test_no_shipped_bound_is_under_its_evidence():
    for engine in ("vllm", "sglang", "split"):
        file = shipped_file(engine)
        known = {(figure.term, figure.id): figure for figure in file.evidence}
        assert len(known) == len(file.evidence)
        for shipped in file.records:
            for log in shipped.evidence:
                figure = known[shipped.term, log]
                assert figure.source
                assert figure.predicted_bytes * shipped.bound_permille >= figure.measured_bytes * 1000


def test_every_engine_finds_its_records():
    assert shipped_terms("split") == (*shipped_file("split").records, *shipped_terms("vllm"))
    assert {record.engine for record in shipped_file("split").records} == {"split"}
    assert {record.engine for record in shipped_terms("vllm")} == {"vllm"}
    assert shipped_terms("exllamav3") == ()
    assert shipped_terms("../vllm") == ()


def test_file_reads_back_as_written():
    file = shipped_file("vllm")
    assert read_terms(write_terms(file)) == file


def test_file_with_a_bound_under_its_evidence_is_refused():
    figure = LogEvidence(term="graphs", id="a", source="s", measured_bytes=1201, predicted_bytes=1000)
    with pytest.raises(ValueError, match="a bound under it"):
        TermFile(schema="tonnage.terms/1", evidence=(figure,), records=(record(),))
    with pytest.raises(ValueError, match="no evidence b"):
        TermFile(schema="tonnage.terms/1", evidence=(figure,), records=(record(evidence=("b",), bound_permille=9000),))
    with pytest.raises(ValueError, match="under the expectation"):
        record(bound_permille=999)
    raw = write_terms(TermFile(schema="tonnage.terms/1", evidence=(figure,), records=(record(bound_permille=1300),)))
    with pytest.raises(msgspec.ValidationError, match="a bound under it"):
        read_terms(raw.replace(b'"bound_permille":1300', b'"bound_permille":1100'))


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True), ({"gpu_class": "hopper"}, True), ({"gpu_class": "sm120"}, False), ({"ranks": (2, 2)}, True),
        ({"ranks": (3, 4)}, False), ({"kinds": ("dense",)}, True), ({"kinds": ("routed",)}, False),
        ({"since": (0, 30)}, True), ({"before": (0, 30)}, False), ({"since": (0, 31)}, False), ({"engine": "sglang"}, False),
        ({"term": "context"}, False),
    ],
)  # fmt: skip
def test_record_holds_within_its_ranges(changes: dict[str, object], holds: bool):
    assert record(**changes).holds_for(CASE) == holds


def test_unknown_release_or_gpu_is_in_no_stated_range():
    unknown = replace(CASE, release=None, gpu_class=None)
    assert not record(since=(0, 20)).holds_for(unknown)
    assert not record(gpu_class="hopper").holds_for(unknown)
    assert record().holds_for(unknown)


def test_narrowest_record_is_used():
    wide = record(given_up=("release", "kind", "gpu"), evidence=("a", "b", "c"))
    middle = record(given_up=("gpu",), since=(0, 27), kinds=("dense",))
    narrow = record(since=(0, 27), kinds=("dense",), gpu_class="hopper")
    assert find_record((wide, narrow, middle), CASE) is narrow
    assert find_record((wide, middle), CASE) is middle
    assert find_record((), CASE) is None


def test_bound_widens_with_every_range_given_up_and_says_so():
    def term(found: TermRecord, case: Case = CASE):
        return calibrated("runtime.graphs", (1000, 1000), case, (found,), rule="r")

    narrow = term(record())
    assert (narrow.nbytes, narrow.bound_nbytes, narrow.basis) == (1000, 1200, "calibrated")
    assert narrow.source == "r; bound at or above the 1 log when scaled to its size (1.00-2.00 GiB)"
    wide = term(record(given_up=("gpu", "ranks")))
    assert wide.bound_nbytes == 1875
    assert wide.source.endswith("(1.00-2.00 GiB); none is of hopper, 2 ranks: widened")
    assert "bound at or above each of 2 logs" in term(record(evidence=("a", "b"))).source
    # what nobody stated is not outside anything
    assert term(record(given_up=("gpu", "release")), replace(CASE, gpu_class=None, release=None)).bound_nbytes == 1200


def test_rules_own_limit_is_never_undercut():
    term = calibrated("t", (1000, 5000), CASE, (record(),), rule="r")
    assert (term.nbytes, term.bound_nbytes) == (1000, 5000)


TOTAL = Case(term="total", engine="split", release=None, gpu_class="sm120", ranks=8, kind="hybrid+vision")
SUM = record(
    term="total", engine="split", gpu_class="sm120", ranks=(5, 1024), kinds=("hybrid+vision",), expected_permille=1050,
    bound_permille=1200, evidence=("p",), largest_predicted_bytes=1000,
)  # fmt: skip


def parts(*sizes: tuple[int, int]) -> tuple[Term, ...]:
    return tuple(
        Term(component=f"runtime.{n}", nbytes=nbytes, bound_nbytes=bound, basis="modelled", source="r")
        for n, (nbytes, bound) in enumerate(sizes)
    )


def sums(terms: tuple[Term, ...]) -> tuple[int, int]:
    return sum(term.nbytes for term in terms), sum(term.bound_nbytes for term in terms)


def test_total_moves_the_sum_and_shares_its_margin_among_terms():
    corrected = in_total(parts((400, 1000), (600, 900)), TOTAL, (SUM,))
    # 1050 expected, 1200 at most: 150 shared as 600 and 300
    assert [(term.nbytes, term.bound_nbytes) for term in corrected] == [(420, 520), (630, 680)]
    assert {term.basis for term in corrected} == {"calibrated"}
    assert (
        corrected[0].source
        == "r; sum of such terms: bound at or above the 1 package when scaled to its size (1.00-2.00 GiB)"
    )


@pytest.mark.parametrize(
    ("sizes", "expected", "bound"),
    [
        (((400, 400), (600, 600)), 1050, 1200),  # terms without a margin of their own: the evidence still holds
        (((400, 450), (600, 650)), 1050, 1200),  # bounds under the evidence: likewise
        (((200, 500), (300, 400)), 525, 900),  # a smaller sum: its own bounds, where they are lower
        (((200, 900), (300, 900)), 525, 1200),  # and never more than the larger sum took
        (((800, 1600), (1200, 2400)), 2100, 1200 + 2000),  # the excess of 1000 is bounded by its own terms
    ],
)
def test_bound_of_a_total(sizes: tuple[tuple[int, int], ...], expected: int, bound: int):
    middle, most = sums(in_total(parts(*sizes), TOTAL, (SUM,)))
    assert middle == expected
    assert bound <= most <= bound + len(sizes) - 1  # every term is rounded up


def test_sum_beyond_the_evidence_says_so():
    assert "bounds of its own for the excess" in in_total(parts((2000, 4000)), TOTAL, (SUM,))[0].source


def test_total_holds_for_its_case_alone():
    terms = parts((400, 1000), (600, 900))
    for other in ({"gpu_class": "hopper"}, {"gpu_class": None}, {"ranks": 4}, {"kind": "dense"}, {"engine": "vllm"}):
        assert in_total(terms, replace(TOTAL, **other), (SUM,)) == terms
    assert in_total(parts((0, 5)), TOTAL, (SUM,)) == parts((0, 5))
    assert case_of("total", Deployment(engine="split", topology=Topology(tp=8)), "dense").engine == "split"


def test_expected_is_the_middle_and_the_bound_is_over_the_largest():
    figures = [seen(900), seen(1000, model="n"), seen(1500, model="o")]
    for found in fit_records(figures):
        assert found.expected_permille == 1000
        assert found.bound_permille == 1500 + 375
        assert found.evidence == ("m-900", "n-1000", "o-1500")
        assert (found.smallest_bytes, found.largest_bytes) == (900, 1500)


def test_equal_figures_of_one_model_count_once():
    repeated = [seen(900) for _ in range(9)] + [seen(1000, model="n"), seen(1100, model="o")]
    assert {found.expected_permille for found in fit_records(repeated)} == {1000}


def test_with_few_figures_the_rule_counts_as_one():
    assert ENOUGH == 3
    found = fit_records([seen(400)])[0]
    assert (found.expected_permille, found.bound_permille) == (700, 1350)
    assert fit_records([seen(2000)])[0].bound_permille == 2700


def test_figures_under_unstated_limits_move_no_middle():
    assert fit_records([seen(5000, stated=False)]) == ()
    assert {f.expected_permille for f in fit_records([seen(1000), seen(5000, model="n", stated=False)])} == {1000}
    few = fit_records([seen(1000), seen(5000, model="n", stated=False)])
    assert all(found.bound_permille >= 5000 for found in few)


def test_order_of_logs_does_not_matter():
    figures = [seen(900 + n, model=str(n)) for n in range(20)]
    assert fit_files(figures) == fit_files(figures[::-1])


def test_scaling_rounds_up():
    assert [scaled_up(n, 1001) for n in (0, 1, 1000)] == [0, 2, 1001]


def test_newer_summary_is_taken_apart(agreement):
    row = LogRow(
        id="new", source="s", engine="vllm", engine_version="0.30", gpu="H100", weights_gib_per_gpu="15.0",
        activation_gib="3.0", graph_gib="0.5", max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=4096,
        notes="consumed 16.0; graph estimate 1.0",
    )  # fmt: skip
    row = msgspec.json.decode(msgspec.json.encode(row), type=LogRow)
    shape = logs_shape(agreement)
    figures = {figure.case.term: figure.evidence for figure in seen_in(logged(row, shape))}
    # 16 - 15 + 3 - 1 GiB less 256 MiB of libraries and the runner's buffers
    assert set(figures) == {"activation", "graphs", "graph-estimate"}
    assert 2.7 < figures["activation"].measured_bytes / (1 << 30) < 2.76


def logs_shape(agreement):
    return next(log.shape for log in agreement.logs()[0] if log.row.id == "llama-3.1-8b-instruct-vllm-tp1-018")


def test_logs_without_a_rule_are_refused_by_name():
    row = LogRow(id="x", source="s", engine="tensorrt-llm")
    assert "no rules for this engine" in str(refused(row))
    assert "first engine" in str(refused(msgspec.structs.replace(row, engine="vllm", engine_version="V0")))
    assert "data-parallel" in str(refused(msgspec.structs.replace(row, engine="vllm", ep=8)))
    assert refused(msgspec.structs.replace(row, engine="vllm")) is None


@pytest.mark.parametrize("figure", ["-1", "NaN", "Infinity", "1E+9999999", "1048577", "1E-19", "0.0000000000000000001"])
def test_figures_that_no_log_prints_are_refused_by_name(figure: str):
    row = LogRow(id="x", source="s", engine="vllm", activation_gib=Decimal(figure))
    assert "activation_gib is no figure; expected a decimal from 0 to 1048576" in str(refused(row))
    for printed in ("0", "1048576", "0.85", "1E+2", "0.0000000000000001"):
        assert refused(msgspec.structs.replace(row, activation_gib=Decimal(printed))) is None


def test_numbers_without_end_in_notes_are_no_figures():
    assert consumed_gib(LogRow(id="x", source="s", engine="vllm", notes="consumed 12.5 GiB")) == Decimal("12.5")
    for digits in ("9" * 5000 + ".5", "1." + "0" * 5000, "\u0661.5"):
        row = LogRow(id="x", source="s", engine="vllm", notes=f"consumed {digits}")
        assert consumed_gib(row) is None


def test_the_second_log_of_a_name_is_left_out(tmp_path: Path, configs: Path):
    path = tmp_path / "logs.jsonl"
    line = b'{"id": "a", "source": "s", "engine": "vllm", "model_id": "Qwen/Qwen3-8B"}'
    path.write_bytes(line + b"\n" + line)
    used, left_out = read_logs(path, configs)
    assert len(used) == 1
    assert [str(problem) for problem in left_out] == ["a: another log of this name came before"]


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b'{"id": 3}', b'{"id": "a", "source": "s", "engine": "vllm", "tp": "x"}', b"\xff", b'{"id": ' + b"[" * 5000,
        b'{"id": "a", "source": "s", "engine": "vllm", "config": {"a": ' + b"[" * 5000,
        b'{"id": "a", "source": "s", "engine": "vllm", "max_num_seqs": -1}',
    ],
)  # fmt: skip
def test_garbage_is_no_log(line: bytes, tmp_path: Path):
    path = tmp_path / "logs.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(CheckpointError, match=r"logs.jsonl:2: no log record"):
        read_logs(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", "-1"), ("pp", "1" + 30 * "0"),
     ("graph_gib", '"NaN"'), ("weights_gib_per_gpu", '"Infinity"'), ("kv_available_gib", '"1e999999"')],
)  # fmt: skip
def test_a_log_that_says_what_cannot_be_is_left_out(name: str, value: str, tmp_path: Path, configs: Path):
    path = tmp_path / "logs.jsonl"
    known = f'{{"id": "a", "source": "s", "engine": "vllm", "model_id": "Qwen/Qwen3-8B", "{name}": {value}}}'
    path.write_text(known)
    used, left_out = read_logs(path, configs)
    assert used == []
    assert [problem.where for problem in left_out] == ["a"]
    assert name in str(left_out[0])


def test_logs_without_a_model_are_named(tmp_path: Path, configs: Path):
    path = tmp_path / "logs.jsonl"
    known = b'{"id": "a", "source": "s", "engine": "vllm", "model_id": "Qwen/Qwen3-8B"}'
    path.write_bytes(known + b"\n" + known.replace(b"Qwen/Qwen3-8B", b"../secret").replace(b'"a"', b'"b"'))
    used, left_out = read_logs(path, configs)
    assert [log.row.id for log in used] == ["a"]
    assert [problem.where for problem in left_out] == ["b"]
    assert [log.row.id for log in read_logs(path)[0]] == []


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("H100-80GB-HBM3", "hopper"), ("RTX PRO 6000 Blackwell 96GB", "sm120"), ("RTX 5090 32GB", "sm120"), ("B200", "blackwell-dc"),
        ("GB200", "blackwell-dc"), ("DGX Spark GB10", "gb10"), ("MI355X", "amd"), ("RTX 3090 24GB (16x)", "ampere-ada"),
        ("A100 80GB", "a100"), ("H20 96GB (8x)", "hopper"), ("80GB class", None), (None, None),
    ],
)  # fmt: skip
def test_class_of_a_gpu_by_the_name_in_a_log(name: str | None, gpu: str | None):
    assert class_of_name(name) == gpu


def test_baseline_sees_all_ranks_and_other_terms_those_of_a_stage():
    deployment = Deployment(engine="split", topology=Topology(tp=2, pp=4))
    assert case_of("context", deployment, "dense").ranks == 8
    assert case_of("graphs", deployment, "dense").ranks == 2
    assert case_of("graphs", deployment, "dense").engine == "vllm"
