"""Parsers of documents: of packages and preparations, measurements, calibrations and plans."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import msgspec

from fuzz.mutate import PART, in_parts, json_document, json_lines, text_lines
from fuzz.target import DATA, SEEDS, TESTS, Target, each, files, parts, written
from plan_documents import document_of
from tonnage.calibrate import Fitting, calibrate
from tonnage.calibrations.credit_records import contradictions, parse_record, record_bytes
from tonnage.checkpoint.index import SUFFIX
from tonnage.checkpoint.strict_json import parse_object
from tonnage.cli.fit_terms import read_logs
from tonnage.compare.texts import parse_prompts
from tonnage.credit import CreditInputs
from tonnage.errors import ObservationError
from tonnage.explain import explain, explain_document, read_planned, with_draft
from tonnage.export.agreement import document_problems, read_package_plan, read_provenance
from tonnage.export.comparison import Compared, check_record, read_record
from tonnage.export.joining import Part, join_parts
from tonnage.export.manifest import PackageError, manifest_bytes
from tonnage.export.manifest import parse_manifest as parse_package_manifest
from tonnage.fit_terms import fit_files
from tonnage.measure.record import read_measurement
from tonnage.measure.statement import package_statement, preparation_statement
from tonnage.prepare.journal import read_journal, read_outputs
from tonnage.prepare.summary import read_summary, summary_bytes
from tonnage.report.changes import changes
from tonnage.report.page import plan_page
from tonnage.report.picture import draw_ranks
from tonnage.report.saved import read_saved
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


def joined(raw: bytes) -> None:
    """Join packages of some ranks each by their documents; what comes out agrees with itself and has all their ranks."""
    contents = [*raw.split(PART), *[b""] * 3]
    found = [
        Part(where=f"part-{at}", manifest=parse_package_manifest(contents[at]), plan=contents[at + 1], provenance=contents[at + 2])
        for at in range(0, min(len(contents) - 3, 9), 3)
    ]  # fmt: skip
    package = join_parts(found)
    assert set(package.manifest.ranks) == {rank for part in found for rank in part.manifest.ranks}
    assert manifest_bytes(package.manifest) == package.documents["manifest.json"]


def report(raw: bytes) -> None:
    """Read saved plans as a report does, and draw and write one beside the other."""
    plan, _, before = raw.partition(PART)
    given = (plan, before) if before else (plan,)
    saved = [read_saved(parse_object(one, where="plan.json", kind=ObservationError)) for one in given]
    for width in (320, 1200):
        assert ET.fromstring(draw_ranks(saved[0], width=width)).tag.endswith("svg")  # noqa: S314 - made here
    if len(saved) > 1:
        changes(saved[1], saved[0])
    page = plan_page(*saved[:2])
    assert page.count("<script") == page.count("</script>") == 1


def comparison(raw: bytes) -> None:
    """Read a comparison that an export cites, and prompts of a user."""
    document, _, prompts = raw.partition(PART)

    def cited() -> None:
        record = read_record(parse_object(document, where="compared.json", kind=PackageError), where="compared.json")
        assert msgspec.json.decode(msgspec.json.encode(record.cited), type=Compared) == record.cited
        check_record(record, source="sha256:0a", weights="sha256:0b", converted=[one.name for one in record.errors])

    each(lambda read: read(), (cited, lambda: parse_prompts(prompts, where="prompts.txt")))


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


def _reports() -> list[bytes]:
    documents = [json.dumps(document_of(case)).encode() for case in ("fits", "refused", "stages", "no supply")]
    return [*documents, parts(*documents[:2])]


def _comparisons() -> list[bytes]:
    [compared] = files(DATA / "frozen" / "0.1.0", "compare.json")
    return [parts(compared, b"Who are you?\n\nCount to ten.\n")]


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
    Target(run=joined, mutate=in_parts(json_document), seeds=lambda: [parts(*files(SEEDS / "joined"))]),
    Target(run=report, mutate=in_parts(json_document), seeds=_reports, longest=1 << 17),
    Target(run=comparison, mutate=in_parts(json_document, text_lines), seeds=_comparisons),
)  # fmt: skip
