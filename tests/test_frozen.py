"""What earlier versions wrote is read, verified and used by this one; ``scripts/freeze.py`` wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import run_words
from samples import file_contents, load_script
from tonnage import open_rank
from tonnage.calibrations.term_records import read_terms
from tonnage.observe.io import hold_against, read_plan
from tonnage.report.documents import PLAN_SCHEMA
from tonnage.version import __version__

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "data" / "frozen"
VERSIONS = sorted(path for path in FROZEN.iterdir() if path.is_dir())
KEY = ("--key", FROZEN / "key.pub.pem")


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def frozen(request, tmp_path):
    """A copy of what a version wrote, with the times of its checkpoint's files as they were."""
    place = Path(shutil.copytree(request.param, tmp_path / "frozen"))
    load_script("freeze").set_times(place / "checkpoint")
    return place


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def test_this_version_is_frozen():
    assert __version__ in [path.name for path in VERSIONS]
    assert all(sum(map(len, file_contents(path).values())) < 300_000 for path in VERSIONS)


def test_package_verifies_whole_and_by_rank(frozen):
    done = run_words("verify", frozen / "package", *KEY, "--json")
    assert (done.status, json.loads(done.out)["mode"]) == (0, "full")
    assert run_words("verify", frozen / "package", *KEY, "--rank", 1).status == 0
    file = frozen / "package" / "weights" / "tp2" / "rank-1" / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    refused = run_words("verify", frozen / "package", *KEY)
    assert (refused.status, "rank 1" in refused.err) == (4, True)


def test_package_verifies_with_the_stock_library(frozen):
    from model_signing import verifying

    config = verifying.Config().use_elliptic_key_verifier(public_key=KEY[1])
    config.verify(frozen / "package", frozen / "package" / "model.sig")
    (frozen / "package" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json"):
        config.verify(frozen / "package", frozen / "package" / "model.sig")


def test_package_is_measured_and_explained_as_it_was(frozen):
    then = read(frozen / "measurement.json")
    now = json.loads(run_words("measure", frozen / "package", "--date", "2027-01-01", "--json").out)
    payload = [[rank["payload_bytes"] for rank in one["packages"][0]["ranks"]] for one in (then, now)]
    assert (
        payload[0] == payload[1] == [rank["weights_bytes"] for rank in read(frozen / "package" / "plan.json")["ranks"]]
    )
    planned = ("--plan", frozen / "package" / "plan.json")
    done = run_words("explain", *planned, "--measured", frozen / "measurement.json")
    assert (done.status, "equal to what was measured, to the byte" in done.out) == (0, True), done.err


def test_ranks_put_together_are_the_checkpoint_again(frozen):
    with open_rank(frozen / "package", 0) as first, open_rank(frozen / "package", 1) as second:
        assert list(first) == list(second)
        norm = "model.norm.weight"
        assert first[norm].tobytes() == second[norm].tobytes()
        whole = (frozen / "checkpoint" / "model.safetensors").read_bytes()
        assert first["lm_head.weight"].tobytes() + second["lm_head.weight"].tobytes() in whole


def test_comparison_gives_the_figures_it_gave(frozen):
    done = run_words("compare", frozen / "checkpoint", frozen / "package", "--json")
    now, then = json.loads(done.out), read(frozen / "compare.json")
    assert now["schema"] == then["schema"]
    assert now["total"] == then["total"]
    assert now["tensors"] == then["tensors"]


def test_records_of_credit_hold_and_decide_a_plan(frozen):
    credit = frozen / "credit.json"
    assert run_words("calibrations", "check", credit).status == 0
    config = ROOT / "src" / "tonnage" / "synth" / "kimi_k31.json"
    words = ("--tp", 8, "--estimator", "credit", "--calibration", credit, "--json")
    plan = json.loads(run_words("plan", config, *words).out)
    assert f"calibration {read(credit)['id']}" in plan["ranks"][0]["lines"][0]["source"]


def test_measurement_is_evidence_for_a_calibration(frozen, tmp_path):
    measured = ("--measured", frozen / "measurement.json", "-o", tmp_path / "new.json", "--name", "new")
    done = run_words("calibrate", frozen / "checkpoint", *measured)
    assert done.status == 0, done.err
    assert run_words("calibrations", "check", tmp_path / "new.json").status == 0


def test_records_of_terms_are_read_and_logs_fitted_again(frozen, tmp_path):
    then = read_terms((frozen / "terms" / "vllm.json").read_bytes())
    assert then.records
    assert run_words("calibrations", "fit-terms", frozen / "logs.jsonl", "-o", tmp_path / "terms").status == 0
    now = read_terms((tmp_path / "terms" / "vllm.json").read_bytes())
    assert {record.term for record in now.records} >= {record.term for record in then.records}


def test_observation_is_a_log_record(frozen, tmp_path):
    (tmp_path / "logs.jsonl").write_text(
        json.dumps({"id": "frozen", "source": "frozen"} | read(frozen / "observation.json"))
    )
    done = run_words("calibrations", "fit-terms", tmp_path / "logs.jsonl", "-o", tmp_path / "terms", "--json")
    assert done.status == 0, done.err


def test_plan_of_what_is_served_is_held_against_a_log(frozen):
    facts = read(frozen / "frozen.json")
    assert read(frozen / "served-plan.json")["schema"] == PLAN_SCHEMA
    held = hold_against(str(ROOT / facts["log"]), read_plan(frozen / "served-plan.json"))
    assert (5 if held.exceeds else 0) == facts["observed_status"]


def test_interrupted_preparation_is_taken_up_or_refused_by_name(frozen):
    """Whatever changed since: never a traceback, never other bytes under a final name; ``--force`` starts over."""
    words = ("prepare", frozen / "checkpoint", "--tp", 2, "--convert", "mxfp8", "--workers", 1, "-o", frozen / "killed")
    done = run_words(*words)
    assert done.status in (0, 2), done.err
    if done.status == 2:
        assert all(line.startswith("tonnage: ") for line in done.err.splitlines())
        assert "--force starts over" in done.err
        assert not (frozen / "killed" / "prepare.json").exists()
        assert run_words(*words, "--force").status == 0
    with open_rank(frozen / "killed", 0) as now, open_rank(frozen / "package", 0) as then:
        assert {name: now[name].tobytes() for name in now} == {name: then[name].tobytes() for name in then}
