"""Calibration records: what they hold, which one a plan uses, and that none lies under its evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.api import Checkpoint, PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.calibrate import Fitting, calibrate, calibrate_document
from tonnage.calibrations.credit_records import (
    CreditRecord,
    Evidence,
    Subject,
    choose_record,
    contradictions,
    parse_record,
    record_bytes,
    use_record,
)
from tonnage.calibrations.io import known_records, records_at, shipped_records
from tonnage.credit import CreditInputs
from tonnage.errors import CreditError
from tonnage.measure.record import MeasuredRank, Measurement, read_measurement

ROOT = Path(__file__).resolve().parent.parent
SEED = json.loads((ROOT / "tests" / "data" / "seed_case.json").read_text())
K31 = json.loads((ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json").read_text())
SHIPPED = {found.record.id: found.record for found in shipped_records()}
SEED_RECORD = SHIPPED["kimi-k3.1-pro-exl3-2bit-tp8-475"]
SEED_INPUTS = CreditInputs(
    device_bytes=802_341_903_064, tp_size=8, counted_bf16_bytes=95_626_985_472, latent_pair_bytes=9_453_961_216
)
FITTING = Fitting(
    name="Kimi K3.1 (2 bit)", family="kimi_k3", digest="a" * 64, stored_bytes=796_968_398_552, inputs=SEED_INPUTS,
    draft_bytes=5_373_504_512, step_permille=5, date="2026-11-30",
)  # fmt: skip
SUBJECT = Subject(
    digest="b" * 64, family="kimi_k3", stored_bytes=796_967_966_208, device_bytes=802_341_470_720,
    counted_bf16_bytes=95_626_985_472, latent_pair_bytes=9_453_961_216, tp=8,
)  # fmt: skip


def measurement(*nbytes: int, **about: Any) -> Measurement:
    ranks = tuple(MeasuredRank(rank=rank, payload_bytes=size) for rank, size in enumerate(nbytes))
    return Measurement(**{"source": "a package", "ranks": ranks, **about})


# --- fitting ---------------------------------------------------------------------------------------------------------


def test_seed_case_gives_every_figure_of_the_report():
    record = calibrate(FITTING, [read_measurement(json.dumps(SEED).encode(), "seed_case.json")])
    document = calibrate_document(record, SHIPPED["kimi-k3.1-pro-exl3-2bit-tp8-375"])
    assert document["per_rank_before_credit_bytes"] == SEED["per_rank_counted_before_credit_bytes"] == 100_292_737_883
    assert document["bound_bytes"] == SEED["worst_rank_bound_bytes"] == 46_133_217_240
    assert document["bound_percent"] == SEED["worst_rank_bound_percent_as_reported"] == "47.62"
    assert document["bound_fraction"] == pytest.approx(0.4762, abs=1e-4)
    assert document["chosen_permille"] == SEED["new_credit_permille"] == 475
    assert document["savings_bytes"] == SEED["new_credit_savings_bytes"] == 46_013_690_675
    assert document["estimate_bytes"] == SEED["new_per_rank_estimate_bytes"] == 94_541_026_549
    assert document["headroom_bytes"] == SEED["headroom_over_largest_rank_bytes"] == 14_940_821
    assert f"{document['ideal_fraction']:.1%}" == f"{SEED['ideal_reduction_percent_as_reported']}%"
    # 95,736,363,867 estimated with 37.5 %, 94,526,085,728 measured
    assert document["before"]["pessimism_bytes"] == 95_736_363_867 - 94_526_085_728
    assert document["before"]["savings_bytes"] == SEED["old_credit_savings_bytes"]
    (evidence,) = record.evidence
    assert (evidence.packages, evidence.largest_rank_bytes, evidence.smallest_rank_bytes, evidence.ranks) == (
        12, 94_526_085_728, 94_515_137_120, ()
    )  # fmt: skip
    assert record.not_measured[0] == "ranks between the largest and the smallest"
    assert record.id == "kimi-k3.1-2-bit-tp8-475"


@given(
    largest=st.lists(st.integers(89_000_000_000, 99_700_000_000), min_size=1, max_size=8),
    step=st.integers(1, 100),
)
def test_no_fitted_estimate_lies_under_its_evidence_and_no_larger_credit_would_do(largest: list[int], step: int):
    record = calibrate(replace(FITTING, step_permille=step), [measurement(*largest)])
    assert list(contradictions(record)) == []
    assert record.permille % step == 0
    more = replace(record, permille=record.permille + step) if record.permille + step <= 1000 else None
    assert more is None or list(contradictions(more))


MISMATCHES = {
    "another TP size": ({"tp": 4}, "measured at another TP size; expected TP 8; found TP 4"),
    "expert parallel": ({"ep": 8}, "the credit covers tensor parallelism only"),
    "another checkpoint": ({"checkpoint_digest": "c" * 64}, "packages of another checkpoint"),
}


@pytest.mark.parametrize(("about", "text"), MISMATCHES.values(), ids=MISMATCHES)
def test_measurements_of_something_else_are_refused(about: dict[str, Any], text: str):
    with pytest.raises(CreditError, match=text):
        calibrate(FITTING, [measurement(94_526_085_728, **about)])


def test_a_rank_above_the_estimate_without_any_credit_is_refused():
    # 100,292,737,883 before credit, less 1/16 of 9,453,961,216 over 8 ranks
    with pytest.raises(CreditError, match="at most 100218878811 bytes; found 100218878812 bytes"):
        calibrate(FITTING, [measurement(100_218_878_812)])


def test_ranks_that_save_more_than_there_is_to_convert_are_refused():
    # without a credit 100,292,737,883: the counted bytes and the latent pair's share over 8 ranks are 12,027,232,256
    with pytest.raises(CreditError, match="the ranks save more than there is to convert"):
        calibrate(FITTING, [measurement(100_292_737_883 - 12_027_232_256 - 1)])


def test_evidence_names_its_packages_and_counts_none_twice():
    digests = ("a" * 64, "b" * 64)
    record = calibrate(FITTING, [measurement(94_526_085_728, packages=2, package_digests=digests)])
    assert record.evidence[0].package_digests == digests
    for again in (measurement(94_526_085_728, package_digests=digests[:1]), measurement(94_526_085_728)):
        other = measurement(94_526_085_728, source="a copy" if again.package_digests else again.source,
                            package_digests=again.package_digests)  # fmt: skip
        with pytest.raises(CreditError, match="twice"):
            calibrate(FITTING, [again, other])


@pytest.mark.parametrize("name", ["../evil", "MyCal", "a b", "", "x" * 101, "-rf", "a\n"])
def test_what_can_be_no_name_of_a_record_is_refused_before_anything_is_written(name: str):
    with pytest.raises(CreditError, match="--name: not a name of a record"):
        calibrate(FITTING, [measurement(94_526_085_728)], name=name)


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_shipped_record_holds_and_bears_the_name_of_its_file():
    for found in shipped_records():
        assert list(contradictions(found.record)) == []
        assert found.path == f"shipped: {found.record.id}.json"


def test_shipped_seed_records_have_the_integers_of_the_seed_case():
    for record in SHIPPED.values():
        assert record.credit_inputs == SEED_INPUTS
        assert record.checkpoint.stored_bytes == SEED["stored_bytes"]
    old = SHIPPED["kimi-k3.1-pro-exl3-2bit-tp8-375"]
    assert (old.permille, old.evidence, old.choice) == (SEED["old_credit_permille"], (), None)
    assert SEED_RECORD.choice is not None
    assert SEED_RECORD.choice.headroom_bytes == SEED["headroom_over_largest_rank_bytes"]
    assert SEED_RECORD.evidence[0].packages == SEED["measured"]["exports"]
    assert SEED_RECORD.supersedes == (old.id,)


def test_a_measured_rank_one_byte_above_the_estimate_contradicts_the_record():
    def with_rank(nbytes: int) -> CreditRecord:
        (evidence,) = SEED_RECORD.evidence
        return replace(SEED_RECORD, evidence=(replace(evidence, largest_rank_bytes=nbytes),))

    assert list(contradictions(with_rank(94_541_026_549))) == []
    (problem,) = contradictions(with_rank(94_541_026_550))
    assert (problem.expected, problem.found) == ("at most 94541026549 bytes", "94541026550 bytes")


def test_the_worst_figure_counts_wherever_it_stands():
    rank = {"rank": 3, "nbytes": 94_541_026_550}
    for field, value in (("smallest_rank_bytes", 94_541_026_550), ("ranks", [rank])):
        document = json.loads(record_bytes(SEED_RECORD))
        document["evidence"][0][field] = value
        assert list(contradictions(parse_record(json.dumps(document).encode(), where="x")))


def test_a_record_reads_back_as_it_was_written_and_derived_figures_are_never_read():
    raw = record_bytes(SEED_RECORD)
    assert parse_record(raw, where="x") == SEED_RECORD
    document = json.loads(raw)
    assert document["derived"]["estimate_bytes"] == 94_541_026_549
    document["derived"] = {"estimate_bytes": 1}
    assert parse_record(json.dumps(document).encode(), where="x") == SEED_RECORD


HOSTILE: dict[str, dict[str, Any]] = {
    "another schema": {"schema": "tonnage.calibration/2"},
    "another kind": {"kind": "magic"},
    "credit beyond the whole": {"permille": 1001},
    "credit as text": {"permille": "475"},
    "negative step": {"step_permille": -5},
    "no ranks": {"tp": 0},
    "a name that is a path": {"id": "../x"},
    "a date that is none": {"date": "yesterday"},
    "bytes beyond any memory": {"inputs": {"device_bytes": 2**63, "counted_bf16_bytes": 1}},
    "its own successor": {"supersedes": [SEED_RECORD.id]},
    "a measured rank of nothing": {"evidence": [{"source": "x", "largest_rank_bytes": 0, "smallest_rank_bytes": 0}]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_record_is_refused_in_one_line(changes: dict[str, Any]):
    raw = json.dumps({**json.loads(record_bytes(SEED_RECORD)), **changes}).encode()
    with pytest.raises(CreditError, match=r"x\.json: not a calibration record") as caught:
        parse_record(raw, where="x.json")
    assert str(caught.value).count("\n") == 0


TWICE = record_bytes(SEED_RECORD).replace(b'"evidence"', b'"evidence": [], "evidence"', 1)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff", b"[" * 100_000, TWICE], ids=["empty", "list", "bytes", "deep", "evidence twice"]
)
def test_what_is_no_json_object_is_refused(raw: bytes):
    with pytest.raises(CreditError, match=r"^x\.json: "):
        parse_record(raw, where="x.json")


@pytest.mark.parametrize(
    "misspelt", [(b'"evidence"', b'"evdence"'), (b'"packages"', b'"package"'), (b'"permille"', b'"credit"')]
)
def test_a_field_that_no_record_has_is_refused_by_name(misspelt: tuple[bytes, bytes]):
    raw = record_bytes(SEED_RECORD).replace(*misspelt)
    with pytest.raises(CreditError, match="not a calibration record"):
        parse_record(raw, where="x.json")


def test_an_estimate_that_cannot_be_contradicts_a_record():
    impossible = replace(SEED_RECORD, inputs=replace(SEED_RECORD.inputs, device_bytes=1))
    (problem,) = contradictions(impossible)
    assert "savings exceed the bytes on the devices" in problem.what


def test_no_file_is_made_of_what_would_not_be_read_back():
    for changes in ({"not_measured": ("",)}, {"inputs": replace(SEED_RECORD.inputs, device_bytes=2**64)}):
        with pytest.raises(CreditError, match="not a calibration record"):
            record_bytes(replace(SEED_RECORD, **changes))


def test_records_of_the_project_take_the_place_of_others_of_their_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    user, project = tmp_path / "data" / "tonnage" / "calibrations", tmp_path / ".tonnage" / "calibrations"
    for folder, permille in ((user, 470), (project, 460)):
        folder.mkdir(parents=True)
        (folder / "x.json").write_bytes(record_bytes(replace(SEED_RECORD, permille=permille)))
    found = {one.record.id: one for one in known_records()}
    assert found[SEED_RECORD.id].record.permille == 460
    assert found[SEED_RECORD.id].path == ".tonnage/calibrations/x.json"
    assert len(found) == len(SHIPPED)


def test_a_place_without_records_is_refused(tmp_path, monkeypatch):
    with pytest.raises(CreditError, match="1 to 10000 of them; found 0"):
        list(records_at(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "x" * 300)
    with pytest.raises(CreditError, match="cannot be read"):
        known_records()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(CreditError, match="no home directory"):
        known_records()


def test_a_broken_file_among_the_records_is_named(tmp_path):
    (tmp_path / "a.json").write_bytes(record_bytes(SEED_RECORD))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(CreditError, match=r"b\.json: not a calibration record"):
        list(records_at(tmp_path))


# --- choosing --------------------------------------------------------------------------------------------------------


def test_a_record_of_this_checkpoint_and_tp_is_calibrated():
    chosen = choose_record([*SHIPPED.values()], SUBJECT)
    assert chosen is not None
    assert (chosen.record, chosen.basis) == (SEED_RECORD, "calibrated")
    assert "recognised by its bytes" in chosen.why


ASSUMED = {
    "another TP size": ({"tp": 16}, "TP 8"),
    "other bytes": ({"stored_bytes": 1_561_217_377_280, "device_bytes": 1_561_217_377_280}, "Kimi-K3.1-Pro"),
    "other projections": ({"counted_bf16_bytes": 95_626_985_470}, "Kimi-K3.1-Pro"),
    "both": ({"tp": 4, "latent_pair_bytes": 0}, "Kimi-K3.1-Pro EXL3-2bit and TP 8"),
}


@pytest.mark.parametrize(("changes", "text"), ASSUMED.values(), ids=ASSUMED)
def test_a_record_of_something_else_is_only_assumed_and_says_so(changes: dict[str, Any], text: str):
    chosen = choose_record([*SHIPPED.values()], replace(SUBJECT, **changes))
    assert chosen is not None
    assert chosen.basis == "assumed"
    assert f"fitted to {text}" in chosen.why
    assert chosen.why.endswith("only assumed to hold here")


def test_no_record_of_the_family_is_no_record():
    assert choose_record([*SHIPPED.values()], replace(SUBJECT, family="llama")) is None
    assert choose_record([], SUBJECT) is None


def test_a_digest_decides_where_it_is_known():
    exact = replace(SEED_RECORD, id="exact", checkpoint=replace(SEED_RECORD.checkpoint, digest="b" * 64), permille=400)
    other = replace(SEED_RECORD, id="other", checkpoint=replace(SEED_RECORD.checkpoint, digest="d" * 64))
    chosen = choose_record([other, exact], SUBJECT)
    assert chosen is not None
    assert (chosen.record.id, chosen.basis) == ("exact", "calibrated")
    assert "recognised" not in chosen.why
    assert use_record(other, SUBJECT).basis == "assumed"


def test_what_is_superseded_or_never_measured_is_not_chosen():
    old = SHIPPED["kimi-k3.1-pro-exl3-2bit-tp8-375"]
    assert choose_record([old], SUBJECT) is None
    newer = replace(SEED_RECORD, id="newer", permille=470, supersedes=(SEED_RECORD.id,), date="2026-01-01")
    chosen = choose_record([SEED_RECORD, newer], SUBJECT)
    assert chosen is not None
    assert chosen.record.id == "newer"


def test_of_two_records_the_newer_and_then_the_more_careful_one_is_chosen():
    newer = replace(SEED_RECORD, id="newer", date="2027-01-01")
    careful = replace(newer, id="careful", permille=300)
    for records, name in (([SEED_RECORD, newer], "newer"), ([careful, newer], "careful")):
        chosen = choose_record(records, SUBJECT)
        assert chosen is not None
        assert chosen.record.id == name


def test_a_record_under_its_own_evidence_is_never_used():
    lying = replace(SEED_RECORD, evidence=(*SEED_RECORD.evidence, Evidence(
        source="another", largest_rank_bytes=94_541_026_550, smallest_rank_bytes=1
    )))  # fmt: skip
    for use in (lambda: choose_record([lying], SUBJECT), lambda: use_record(lying, SUBJECT)):
        with pytest.raises(CreditError, match="the estimate lies under a rank measured in another"):
            use()


# --- planning --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def k31() -> Checkpoint:
    return checkpoint_from_config(K31, name="Kimi-K3.1-Pro")


def credit_line(checkpoint: Checkpoint, **asked: Any) -> tuple[int, str, str]:
    request = PlanRequest(**{"tp": 8, "estimator": "credit", "credit_records": tuple(SHIPPED.values()), **asked})
    line = plan_checkpoint(checkpoint, request).ranks[0].lines[0]
    return line.nbytes, line.basis, line.source


def test_plan_uses_the_calibration_of_checkpoint_and_tp(k31: Checkpoint):
    nbytes, basis, source = credit_line(k31, device_bytes=SEED["device_bytes"])
    assert (nbytes, basis) == (94_541_026_549, "calibrated")
    assert SEED_RECORD.id in source


def test_plan_says_assumed_on_the_line_where_the_calibration_is_of_something_else(k31: Checkpoint):
    # The MXFP4 checkpoint of the same model: 1,561,217,377,280 bytes.
    nbytes, basis, source = credit_line(k31)
    assert (nbytes, basis) == (1_561_217_377_280 // 8 - 46_013_690_675 // 8, "assumed")
    assert "only assumed" in source
    assert credit_line(k31, device_bytes=SEED["device_bytes"], tp=4)[1] == "assumed"


def test_plan_takes_a_named_record_whatever_it_was_fitted_to(k31: Checkpoint):
    old = SHIPPED["kimi-k3.1-pro-exl3-2bit-tp8-375"]
    found = credit_line(k31, device_bytes=SEED["device_bytes"], credit_record=old)
    assert found[:2] == (95_736_363_867, "assumed")
    assert found[2].endswith("without any measurement")


def test_plan_without_any_record_is_refused(k31: Checkpoint):
    with pytest.raises(CreditError, match="no calibrated credit for any kimi_k3 checkpoint"):
        credit_line(k31, credit_records=())


# --- the command -----------------------------------------------------------------------------------------------------

CALIBRATE = (
    "calibrate", "src/tonnage/synth/kimi_k31.json", "--measured", "tests/data/seed_case.json",
    "--device-bytes", "802341903064", "--draft-bytes", "5373504512", "--before", "kimi-k3.1-pro-exl3-2bit-tp8-375",
)  # fmt: skip


def test_calibrate_prints_the_seed_case(tonnage, tmp_path):
    done = tonnage(*CALIBRATE, "-o", tmp_path / "record.json")
    assert done.returncode == 0, done.stderr
    for figure in (
        "46,133,217,240 B", "47.62 %", "475", "46,013,690,675 B", "94,541,026,549 B", "14,940,821 B", "48.4 %",
        "1,210,278,139 B above the largest rank", "of 12 packages",
    ):  # fmt: skip
        assert figure in done.stdout
    written = parse_record((tmp_path / "record.json").read_bytes(), where="x")
    assert written.permille == 475
    again = tonnage(*CALIBRATE, "-o", tmp_path / "record.json")
    assert again.returncode == 0
    other = tonnage(*CALIBRATE, "--step-permille", "10", "-o", tmp_path / "record.json")
    assert (other.returncode, other.stdout) == (2, "")
    assert "--force" in other.stderr
    assert parse_record((tmp_path / "record.json").read_bytes(), where="x") == written


def test_check_exits_5_when_a_measured_rank_is_one_byte_above_the_estimate(tonnage, tmp_path):
    assert tonnage("calibrations", "check").returncode == 0
    document = msgspec.json.decode(record_bytes(SEED_RECORD))
    document["evidence"][0]["largest_rank_bytes"] = 94_541_026_550
    (tmp_path / "edited.json").write_bytes(msgspec.json.encode(document))
    done = tonnage("calibrations", "check", tmp_path)
    assert done.returncode == 5
    assert "expected at most 94541026549 bytes; found 94541026550 bytes" in done.stdout
    (tmp_path / "measured.json").write_text(json.dumps({"ranks": [{"rank": 0, "payload_bytes": 94_541_026_550}]}))
    for words in (
        ("--measured", tmp_path / "measured.json"),
        (SEED_RECORD.id, "--measured", tmp_path / "measured.json"),
    ):
        assert tonnage("calibrations", "check", *words).returncode == 5
    planned = tonnage(
        "plan", "src/tonnage/synth/kimi_k31.json", "--tp", "8", "--estimator", "credit",
        "--calibration", tmp_path / "edited.json",
    )  # fmt: skip
    assert planned.returncode == 2
    assert "lies under a rank measured" in planned.stderr


def test_calibrate_again_with_the_same_inputs_changes_nothing(tonnage, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    words = [word for word in CALIBRATE if word not in ("--before", "kimi-k3.1-pro-exl3-2bit-tp8-375")]
    kept = tmp_path / "tonnage" / "calibrations" / "kimi_k31-tp8-475.json"
    assert tonnage(*words, "--save").returncode == 0
    first = kept.read_bytes()
    assert parse_record(first, where="x").supersedes == (SEED_RECORD.id,)
    again = tonnage(*words, "--save")
    assert (again.returncode, kept.read_bytes()) == (0, first), again.stderr
    assert "calibrated" in tonnage(
        "plan", "src/tonnage/synth/kimi_k31.json", "--tp", "8", "--estimator", "credit",
        "--device-bytes", "802341903064",
    ).stdout  # fmt: skip


def test_check_refuses_a_measurement_that_no_record_is_for(tonnage, tmp_path):
    (tmp_path / "tp4.json").write_text(json.dumps({"tp_size": 4, "largest_rank_bytes": 5, "smallest_rank_bytes": 4}))
    done = tonnage("calibrations", "check", "--measured", tmp_path / "tp4.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "tp4.json" in done.stderr


def test_list_and_show_name_the_shipped_records(tonnage):
    listed = json.loads(tonnage("calibrations", "list", "--json").stdout)["records"]
    assert {row["id"] for row in listed} >= set(SHIPPED)
    shown = json.loads(tonnage("calibrations", "show", SEED_RECORD.id).stdout)
    assert shown["derived"]["headroom_bytes"] == 14_940_821
    missing = tonnage("calibrations", "show", "nothing")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
