"""What the pages claim is what the code does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from components import SOURCE
from doc_blocks import alike, blocks, pages, run_page
from samples import load_script, write_shards
from servers import hub, web
from tonnage.api import PlanRequest, checkpoint_from_config, plan_checkpoint
from tonnage.calibrations.term_records import write_terms
from tonnage.errors import PlacementError, TonnageError
from tonnage.prepare.takes import tensor_parts
from tonnage.report.documents import cache_document
from tonnage.report.tables import plan_table, render

ROOT = Path(__file__).resolve().parent.parent


NOT_RUN = {
    "docs/compare.md": 1,
    "docs/export-names.md": 1,
    "docs/getting-started.md": 1,
    "docs/serve.md": 1,
    "docs/sources.md": 1,
    "docs/ui.md": 1,
    "docs/vllm-plugin.md": 2,
}
"""Blocks no test runs, by page: each says why in the page."""
PAGES = tuple(page for page in pages() if any(blocks(page)))


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_commands_of_the_page_run_and_print_what_it_shows(page, tmp_path):
    """``python tests/doc_blocks.py`` writes what they print now."""
    if "openssl" in page.read_text() and shutil.which("openssl") is None:
        pytest.skip("the page makes its keys with openssl, which is not here")
    assert run_page(page, tmp_path) == page.read_text()


def test_every_block_of_commands_is_run_or_says_why_not():
    found = [block for page in PAGES for block in blocks(page)]
    assert [f"{block.page}:{block.line}" for block in found if block.mark is None] == []
    assert Counter(block.page for block in found if block.mark["reason"]) == NOT_RUN
    for block in found:
        if block.mark["by"]:
            runner = (ROOT / block.mark["by"]).read_text()
            commands = [re.sub(r"\s*#.*", "", line) for line in block.lines]
            assert Path(block.page).name in runner or all(command in runner for command in commands), block


def test_output_that_is_another_by_one_byte_is_another():
    shown = ["bound  46,133,217,240 B", "in 1.5 s"]
    assert alike("tonnage plan x", shown, ["bound  46,133,217,240 B", "in 0.2 s"])
    assert not alike("tonnage plan x", shown, ["bound  46,133,217,241 B", "in 0.2 s"])
    assert not alike("tonnage plan x", shown, shown[:1])
    assert alike("tonnage verify x", shown, ["bound  46,133,217,241 B", "in 0.2 s"])
    assert not alike("tonnage verify x", shown, ["bound  46,133,217,340 B", "in 0.2 s"])


def test_commands_of_the_page_on_sources_run(tmp_path, monkeypatch):
    """Against servers on loopback in the place of the hub and of the web server that the page names."""
    write_shards(tmp_path / "small-llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "sources.md").read_text(), re.DOTALL)
    lines = blocks[0].splitlines()
    assert len(lines) >= 6
    with hub(tmp_path / "small-llama", repository="example-org/small-llama") as there, web(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", there.api.url)
        for line in lines:
            program, *words = line.replace("https://models.example.com", server.url).split()
            assert program == "tonnage"
            done = subprocess.run([Path(sys.executable).with_name(program), *words], capture_output=True, check=False)
            assert done.returncode == 0, (line, done.stderr)


def test_every_row_of_the_vllm_agreement_is_planned_to_the_byte():
    script = load_script("vllm_agreement")
    rows = list(script.rows())
    assert len([row for row in rows if row.group == "first"]) == 106
    assert [row for row in rows if row.difference] == []
    assert (ROOT / "docs" / "vllm-agreement.md").read_text() == script.report(rows)


def test_what_the_readme_says_that_vllm_allocates_is_a_row_of_the_agreement():
    said = re.search(r"`engine\.kv_scales`, ([\d,]+) bytes", (ROOT / "README.md").read_text())
    row = f"| Qwen/Qwen3-235B-A22B-FP8 | 4 |  | 1 | 0 | as stated | {said[1]} | 0 |"
    assert row in (ROOT / "docs" / "vllm-agreement.md").read_text().splitlines()


@pytest.fixture(scope="module")
def k31():
    return load_script("k31_ranks")


@pytest.fixture(scope="module")
def served(k31):
    return plan_checkpoint(k31.checkpoint(), k31.served_request())


def test_k31_page_holds_the_plan_against_the_measured_ranks(k31, served):
    stored, converted = k31.plans()
    assert (ROOT / "docs" / "k31-ranks.md").read_text() == k31.report(stored, converted, k31.published(), served)
    planned = sorted(ledger.fixed_bytes for ledger in converted.ranks)
    assert planned[-1] - planned[0] == 94_526_085_728 - 94_515_137_120
    assert planned[0] >= 94_515_137_120
    assert planned[-1] >= 94_526_085_728


def test_k31_package_fits_its_profile_with_nearly_the_measured_capacity(served):
    """Expected within 90 and 101 % of the published 1,281,024 tokens, at the bound above 90 %."""
    assert served.fits
    capacity, expected = (served.capacity_tokens(expected=e, shared=True) for e in (False, True))
    assert 1_281_024 * 90 // 100 <= capacity <= expected <= 1_281_024 * 101 // 100
    assert all(line.basis and line.source for ledger in served.ranks for line in ledger.lines)


def test_k31_capacity_is_reported_beside_the_states_with_its_basis(k31, served):
    cache = cache_document(served)
    assert cache["basis"] == "calibrated"
    assert "published capacity" in cache["source"]
    assert cache["shared_capacity_tokens"] == 126 * 1152 * 8  # 235 blocks: 126 of tokens, 108 of states, one unused
    assert cache["expected_shared_capacity_tokens"] == 132 * 1152 * 8
    assert cache["capacity_tokens"] == 235 * 262_144 // 56  # as vLLM counts: 29 + 27 blocks for each request
    text = render(plan_table(k31.checkpoint(), k31.served_request(), served, ()), width=200)
    assert "room for 1,161,216 tokens beside the states of 4 requests, expected 1,216,512; room for 1,100,068" in text
    assert "FITS: spare 0.205 GiB on rank 0" in text


def test_k31_terms_together_are_bounded_by_what_the_package_left(k31, served):
    left = 100_942_468_874 - 94_526_085_728 - 248 * 21_786_624
    assert k31.published().beside_bytes == left == 1_013_300_394
    lines = [line for line in served.ranks[0].lines if line.component.startswith(("runtime.", "workspace."))]
    assert left <= sum(line.bound_nbytes for line in lines) <= left * 115 // 100
    assert abs(sum(line.nbytes for line in lines) - left) <= left * 10 // 100


def test_k31_records_are_what_the_script_fits(k31):
    shipped = ROOT / "src" / "tonnage" / "calibrations" / "terms" / "split.json"
    assert shipped.read_bytes() == write_terms(k31.split_file(k31.published()))


@pytest.mark.parametrize(
    "changes", [{"kv_dtype": "bf16"}, {"prefill_chunk_tokens": 8192}, {"concurrency": 5}, {"context_tokens": 393_216}]
)
def test_k31_package_is_refused_a_larger_profile(k31, changes):
    request = k31.served_request()
    plan = plan_checkpoint(k31.checkpoint(), replace(request, profile=replace(request.profile, **changes)))
    assert not plan.fits
    assert "cache > supply 94.010 GiB" in plan.reasons[0]


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


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_the_page_names_exist(page):
    named = re.findall(r"`((?:[\w.*-]+/)+(?:[\w.*-]+\.\w+)?|\w+\.py)`", (ROOT / page).read_text())
    assert len(named) > 10
    for name in named:
        found = re.sub(r"\b(ENGINE|FAMILY|VERSION)\b", "*", name.rstrip("/"))
        assert any(next(base.glob(found), None) for base in (ROOT, SOURCE)), name


def test_the_architecture_names_every_module_at_the_top():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    top = {path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = {f"{path.name}/" if path.is_dir() else path.name for path in top} - {"__init__.py", "__main__.py"}
    assert {name for name in names if f"`{name}" not in page} == set()


def test_pages_link_to_files_that_exist():
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / target).exists(), (page.name, target)
