"""What the pages claim is what the code does."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tonnage.api import PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.errors import PlacementError, TonnageError
from tonnage.prepare.takes import tensor_parts

ROOT = Path(__file__).resolve().parent.parent


def _script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/calibrations.md"])
def test_example_of_the_page_is_the_commands_output(tonnage, page):
    block = re.search(r"```console\n\$ tonnage (?P<words>.*)\n(?P<output>(?:.*\n)*?)```", (ROOT / page).read_text())
    done = tonnage(*block["words"].split())
    assert done.returncode == 0
    assert [line.rstrip() for line in done.stdout.splitlines()] == block["output"].splitlines()


def test_every_row_of_the_vllm_agreement_is_planned_to_the_byte():
    script = _script("vllm_agreement")
    rows = list(script.rows())
    assert len([row for row in rows if row.group == "first"]) == 106
    assert [row for row in rows if row.difference] == []
    assert (ROOT / "docs" / "vllm-agreement.md").read_text() == script.report(rows)


def test_k31_page_holds_the_plan_against_the_measured_ranks():
    script = _script("k31_ranks")
    stored, converted = script.plans()
    assert (ROOT / "docs" / "k31-ranks.md").read_text() == script.report(stored, converted)
    planned = sorted(ledger.fixed_bytes for ledger in converted.ranks)
    assert planned[-1] - planned[0] == 94_526_085_728 - 94_515_137_120
    assert planned[0] >= 94_515_137_120
    assert planned[-1] >= 94_526_085_728


def test_the_page_says_of_which_families_engines_can_be_written():
    page = (ROOT / "docs" / "prepared-checkpoint.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (written|written, but.*|refused) \|$", page, re.MULTILINE)
    said = {family: outcome for families, outcome in rows for family in re.findall(r"`(\w+)`", families)}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests" / "data" / "configs").glob("*.json")):
        with suppress(TonnageError):  # no recipe, or no config of a language model
            checkpoint = checkpoint_from_config(json.loads(path.read_bytes()), name=path.stem)
            for engine, tp in (("split", 2), ("vllm", 2), ("vllm", 8)):
                outcome = _written(checkpoint, PlanRequest(tp=tp, engine=engine))
                assert engine == "vllm" or outcome in (None, "written"), (path.stem, engine)
                if engine == "vllm" and outcome:
                    found.setdefault(checkpoint.family, set()).add(outcome)
    both = {"written", "refused"}
    assert {family: "written, but not of every quantisation and size" if outcomes == both else outcomes.pop()
            for family, outcomes in found.items()} == said  # fmt: skip


def _written(checkpoint, request):
    try:
        plan = plan_checkpoint(checkpoint, request)
    except PlacementError:
        return None
    try:
        for placed in plan.placement.placed:
            list(tensor_parts(placed))
    except PlacementError:
        return "refused"
    return "written"


def test_pages_name_no_command_that_is_missing(tonnage):
    known = tonnage("--help").stdout.split("Commands:")[1]
    for page in ("README.md", "CONTRIBUTING.md"):
        for command in re.findall(r"`tonnage ([a-z]+)", (ROOT / page).read_text()):
            assert re.search(rf"^  {command} ", known, re.MULTILINE), (page, command)


def test_pages_link_to_files_that_exist():
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / target).exists(), (page.name, target)
