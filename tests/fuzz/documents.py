"""Parsers of documents: of packages and preparations, measurements, calibrations and plans."""

from __future__ import annotations

import json

from fuzz.mutate import PART, in_parts, json_document, json_lines
from fuzz.target import DATA, SEEDS, TESTS, Target, files, parts, written
from tonnage.calibrate import Fitting, calibrate
from tonnage.calibrations.credit_records import contradictions, parse_record, record_bytes
from tonnage.checkpoint.index import SUFFIX
from tonnage.cli.fit_terms import read_logs
from tonnage.credit import CreditInputs
from tonnage.explain import explain, explain_document, read_planned, with_draft
from tonnage.export.agreement import document_problems, read_package_plan, read_provenance
from tonnage.export.manifest import manifest_bytes
from tonnage.export.manifest import parse_manifest as parse_package_manifest
from tonnage.fit_terms import fit_files
from tonnage.measure.record import read_measurement
from tonnage.measure.statement import package_statement, preparation_statement
from tonnage.prepare.journal import read_journal, read_outputs
from tonnage.prepare.summary import read_summary, summary_bytes
from tonnage.term_evidence import LogRow, seen_in

_RECORDS = TESTS.parent / "src" / "tonnage" / "calibrations"


def package_manifest(raw: bytes) -> None:
    """Read the manifest of a package; what is read is written in one way only."""
    manifest = parse_package_manifest(raw)
    assert manifest_bytes(manifest) == raw
    assert sum(map(len, manifest.by_rank().values())) <= len(manifest.files)
    assert all(not file.path.startswith(("/", "..")) for file in manifest.files)


def package_documents(raw: bytes) -> None:
    """Read manifest, provenance and plan of a package, and hold them against each other."""
    manifest_raw, provenance_raw, plan_raw, *_ = (*raw.split(PART), b"", b"", b"")
    package_statement(manifest_raw, provenance_raw)
    manifest, provenance, plan = (
        parse_package_manifest(manifest_raw),
        read_provenance(provenance_raw),
        read_package_plan(plan_raw),
    )
    for problem in document_problems(plan, provenance, manifest):
        str(problem)


def summary(raw: bytes) -> None:
    """Read the summary of a preparation, and what it says of its ranks."""
    read = read_summary(raw, where="prepare.json")
    assert read_summary(summary_bytes(read), where="prepare.json") == read
    statement = preparation_statement(raw)
    assert all(path.endswith(SUFFIX) for path in statement.files)


def journal(raw: bytes) -> None:
    """Read the journal of an interrupted preparation."""
    identity, records, good_bytes = read_journal(raw, where="journal")
    assert (identity, records, good_bytes) == read_journal(raw[:good_bytes], where="journal")


def outputs(raw: bytes) -> None:
    """Read the list of files a preparation may have written."""
    read_outputs(raw)


def measurement(raw: bytes) -> None:
    """Read a measurement, and calibrate a credit with it."""
    read = read_measurement(raw, "measured.json")
    assert read.largest_bytes >= read.smallest_bytes
    device_bytes = (read.tp or 8) * read.largest_bytes + 64
    inputs = CreditInputs(device_bytes=device_bytes, tp_size=read.tp or 8, counted_bf16_bytes=device_bytes // 2)
    fitting = Fitting(
        name="a",
        family="llama",
        digest=read.checkpoint_digest,
        stored_bytes=device_bytes,
        inputs=inputs,
        draft_bytes=0,
        step_permille=5,
        date="2026-01-31",
    )
    record = calibrate(fitting, [read])
    assert parse_record(record_bytes(record), where="again") == record


def credit_record(raw: bytes) -> None:
    """Read a record of a credit and look for what contradicts it."""
    record = parse_record(raw, where="record.json")
    for problem in contradictions(record):
        str(problem)
    assert parse_record(record_bytes(record), where="again") == record


def log_rows(raw: bytes) -> None:
    """Read collected logs, and fit terms to them."""
    used, left_out = read_logs(written("logs.jsonl", raw))
    assert all(str(problem).isprintable() for problem in left_out)
    fit_files([one for log in used for one in seen_in(log)])


def saved_plan(raw: bytes) -> None:
    """Read a plan and a measurement and explain one by the other."""
    plan_raw, _, measured_raw = raw.partition(PART)
    planned = read_planned(plan_raw, "plan.json")
    explanation = explain(with_draft(planned), read_measurement(measured_raw, "measured.json"))
    json.dumps(explain_document(explanation))


def _package() -> list[bytes]:
    [manifest] = files(SEEDS / "package_manifest")
    plan, provenance = files(SEEDS / "package_documents")
    return [parts(manifest, provenance, plan)]


def _rows() -> list[bytes]:
    """Return public logs as rows, their models written out."""
    known = json.loads((DATA / "logs_runtime.json").read_bytes())
    rows = []
    for row in known["rows"][::8]:
        fields = {key: value for key, value in row.items() if key in LogRow.__struct_fields__}
        config = known["configs"].get(row.get("model_id"))
        rows.append(json.dumps(fields | ({"config": config} if config else {})).encode())
    return [b"\n".join(rows[at : at + 4]) for at in range(0, len(rows), 4)]


TARGETS = (
    Target(run=package_manifest, mutate=json_document, seeds=lambda: files(SEEDS / "package_manifest")),
    Target(run=package_documents, mutate=in_parts(json_document), seeds=_package),
    Target(run=summary, mutate=json_document, seeds=lambda: files(SEEDS / "summary"), longest=1 << 16),
    Target(run=journal, mutate=json_lines, seeds=lambda: files(SEEDS / "journal")),
    Target(run=outputs, mutate=json_document, seeds=lambda: files(SEEDS / "outputs")),
    Target(run=measurement, mutate=json_document, seeds=lambda: files(SEEDS / "measurement")),
    Target(run=credit_record, mutate=json_document, seeds=lambda: files(_RECORDS / "credit", "*.json")),
    Target(run=log_rows, mutate=json_lines, seeds=_rows),
    Target(run=saved_plan, mutate=in_parts(json_document), seeds=lambda: [parts(files(SEEDS / "package_documents")[0], *files(SEEDS / "measurement"))]),
)  # fmt: skip
