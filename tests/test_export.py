"""``tonnage export``: a preparation becomes a signed package, where it is, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from packages import OPTIONS, RANK, call_scales, prepared_place
from samples import certify, file_contents, prepare_small
from tonnage import open_rank
from tonnage.cli import app
from tonnage.compare.comparison import compare_models, comparison_document
from tonnage.compare.model import open_model
from tonnage.errors import TonnageError
from tonnage.export.comparison import read_record
from tonnage.export.io import export_package, read_added
from tonnage.export.keys import load_private_key
from tonnage.export.manifest import parse_manifest
from tonnage.export.package import Options
from tonnage.export.sign import Key, Signer, load_signer
from tonnage.export.signature import PublicKey, read_signature
from tonnage.export.verify import verify_package
from tonnage.prepare.output_dir import locked
from tonnage.saved_plan import SavedProfile

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
DOCUMENTS = {"plan.json", "provenance.json", "manifest.json"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``small``, ``prepared`` from it, and keys; not to be changed."""
    return prepared_place(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def signer(place: Path) -> Signer:
    return load_signer(Key(path=place / "key.pem"))


@pytest.fixture
def prepared(place: Path, tmp_path: Path) -> Path:
    """A preparation to be changed."""
    return shutil.copytree(place / "prepared", tmp_path / "prepared")


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def planned(checkpoint: Path, *words: str) -> dict[str, Any]:
    """Return what the plan command says."""
    document: dict[str, Any] = json.loads(CliRunner().invoke(app, ["plan", str(checkpoint), *words, "--json"]).stdout)
    return document


def refused(directory: Path, signer: Signer, options: Options = OPTIONS, **more: Any) -> str:
    """Export in vain; nothing is changed by it."""
    before = file_contents(directory)
    with pytest.raises(TonnageError) as caught:
        export_package(directory, signer, options, **more)
    assert file_contents(directory) == before
    assert not (directory / ".prepare").exists() or ".prepare" in {path.split("/")[0] for path in before}
    return str(caught.value)


FIGURES = {
    "positions": 814, "top1_agreement": 0.88, "kl_mean": 0.037, "kl_largest": 0.97, "perplexity_a": 37.1, "perplexity_b": 37.8
}  # fmt: skip
END_TO_END = {
    "text": {"title": "a speech", "sha256": "0" * 64, **FIGURES},
    "prompts": {"count": 8, "same_answers": 2, **FIGURES},
    "ignored_a": [], "ignored_b": [], "weights": "BF16", "computed_in": "F32", "device": "cpu", "versions": {"torch": "2"},
}  # fmt: skip


def comparison(place: Path, b: Path) -> dict[str, Any]:
    """Return what comparing the checkpoint with something gives, and figures end to end that are made up."""
    with open_model(place / "small") as one, open_model(b) as other:
        return {**comparison_document(compare_models(one, other)), "end_to_end": END_TO_END}


# --- what it makes ----------------------------------------------------------------------------------------------------


def test_package_is_what_was_prepared_with_three_documents_and_a_signature(prepared: Path, signer: Signer) -> None:
    before = file_contents(prepared)
    exported = export_package(prepared, signer, OPTIONS)
    after = file_contents(prepared)
    assert after.keys() == before.keys() - {"prepare.json"} | DOCUMENTS | {"model.sig"}
    assert all(after[path] == raw for path, raw in before.items() if path != "prepare.json")
    assert not (prepared / ".prepare").exists()
    assert (exported.files, exported.nbytes) == (len(after), sum(map(len, after.values())))
    assert exported.changed


def test_manifest_and_signature_state_the_digest_of_every_file(place: Path, prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    after = file_contents(prepared)
    manifest = parse_manifest(after["manifest.json"])
    assert {file.path: (file.nbytes, file.digest, file.sha256) for file in manifest.files} == {
        path: (len(raw), blake3(raw).hexdigest(), sha256(raw).hexdigest())
        for path, raw in after.items()
        if path not in ("manifest.json", "model.sig")
    }
    signed = read_signature(after["model.sig"], PublicKey(path=place / "key.pub.pem"))
    assert signed.digests == {path: sha256(raw).hexdigest() for path, raw in after.items() if path != "model.sig"}
    assert (signed.name, signed.hash) == ("llama-tp2-20261130", "sha256")
    assert (manifest.name, manifest.hash) == ("llama-tp2-20261130", "blake3")


def test_manifest_states_ranks_tensors_and_payload(prepared: Path, signer: Signer) -> None:
    planned = {
        rank["rank"]: rank["weights_bytes"]
        for rank in json.loads((prepared / "prepare.json").read_bytes())["plan"]["ranks"]
    }
    export_package(prepared, signer, OPTIONS)
    document = json.loads((prepared / "manifest.json").read_bytes())
    for rank in document["ranks"]:
        with open_rank(prepared, rank["rank"]) as view:
            assert (rank["tensors"], rank["payload_bytes"]) == (len(view), view.payload_bytes)
            assert view.payload_bytes == planned[rank["rank"]]
        own = (prepared / f"weights/tp2/rank-{rank['rank']}").iterdir()
        assert rank["file_bytes"] == sum(path.stat().st_size for path in own)
    assert {file["path"]: file["rank"] for file in document["files"] if "rank-" not in file["path"]} == {
        "config.json": None, "tokenizer.json": None, "plan.json": None, "provenance.json": None
    }  # fmt: skip
    assert all(f"/rank-{file['rank']}/" in file["path"] for file in document["files"] if "rank-" in file["path"])


def test_documents_are_canonical(prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    for name in DOCUMENTS:
        raw = (prepared / name).read_bytes()
        assert raw == rfc8785.dumps(json.loads(raw))


def test_provenance_says_of_what_and_how(place: Path, prepared: Path, signer: Signer) -> None:
    summary = json.loads((prepared / "prepare.json").read_bytes())
    export_package(prepared, signer, OPTIONS)
    raw = (prepared / "provenance.json").read_bytes()
    document = json.loads(raw)
    assert document["schema"] == "tonnage.provenance/1"
    assert document["source"]["name"] == "small"
    assert document["source"]["files"] == [
        {"name": path.name, "nbytes": path.stat().st_size, "digest": blake3(path.read_bytes()).hexdigest()}
        for path in sorted((place / "small").iterdir())
    ]
    assert document["options"]["topology"] == {"tp": 2, "ep": 1, "pp": 1}
    assert document["conversion"] == {
        "from": ["BF16"], "codes": "F8_E4M3", "scales": "F8_E8M0 as U8", "block_elements": 32,
        "scale_rule": "rceil", "nonfinite": "refuse",
    }  # fmt: skip
    table = document["numerics"]["converted"]
    assert document["numerics"]["class"] == "converted"
    assert table == sorted(summary["converted"], key=lambda tensor: tensor["tensor"])
    for clock in ("mtime", "seconds", str(place), str(prepared)):
        assert clock.encode() not in raw


def test_package_of_unchanged_weights_is_neutral(place: Path, tmp_path: Path, signer: Signer) -> None:
    output = prepare_small(place / "small", tmp_path / "plain", convert="none", source_digests=False)
    export_package(output, signer, OPTIONS)
    document = json.loads((output / "provenance.json").read_bytes())
    assert (document["numerics"], document["conversion"]) == (
        {"class": "neutral", "converted": [], "compared": None},
        None,
    )
    assert [file["digest"] for file in document["source"]["files"] if file["name"] == "model.safetensors"] == [None]


def test_a_comparison_is_cited_and_shown_by_verify(
    place: Path, prepared: Path, signer: Signer, tonnage: Tonnage
) -> None:
    document = comparison(place, prepared)
    options = replace(OPTIONS, compared=read_record(document, where="record"))
    export_package(prepared, signer, options)
    cited = json.loads((prepared / "provenance.json").read_bytes())["numerics"]["compared"]
    end_to_end = {key: value for key, value in END_TO_END.items() if not key.startswith("ignored")}
    assert cited == {
        **{key: document[key] for key in ("tonnage_version", "identical", "tensors", "total")},
        "end_to_end": end_to_end,
    }

    words = ("verify", prepared, "--key", place / "key.pub.pem", "--rank", 0)
    said = next(line for line in tonnage(*words).stdout.splitlines() if line.startswith("numerics: "))
    assert said.startswith("numerics: converted, 7 tensors, SQNR at least 3")
    assert said.endswith(" dB in all, top-1 88.00%, KL 0.037 nats over 814 tokens")
    numerics = json.loads(tonnage(*words, "--json").stdout)["numerics"]
    assert numerics["compared"] == cited
    assert numerics["converted_tensors"] == 7

    assert not export_package(prepared, signer, options).changed  # the same once more
    other = replace(OPTIONS, compared=read_record({**document, "tonnage_version": "0"}, where="record"))
    assert "already packaged: the comparison it cites cannot change" in refused(prepared, signer, other)


def differs(document: dict[str, Any], name: str) -> None:
    """Let one more tensor differ."""
    next(error for error in document["errors"] if error["name"] == name)["identical"] = False
    document["tensors"]["differing"] += 1


def forgets(document: dict[str, Any]) -> None:
    """Leave out a tensor that differs, and count accordingly."""
    document["errors"].remove(next(error for error in document["errors"] if not error["identical"]))
    for count in ("compared", "differing"):
        document["tensors"][count] -= 1


FOREIGN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another source": (lambda d: d["a"].update(digest="0" * 64), "A is not the source of this package"),
    "no source": (lambda d: d["a"].update(of="prepared"), "A is not the source of this package"),
    "other weights": (lambda d: d["b"].update(digest="0" * 64), "B is not the weights of this package"),
    "weights unknown": (lambda d: d["b"].update(digest=None), "B is not the weights of this package"),
    "a tensor that is not converted": (
        lambda d: differs(d, "model.norm.weight"),
        "model.norm.weight: differs, and is not on record as converted",
    ),
    "fewer tensors": (forgets, "was converted, and is not among those compared"),
}


@pytest.mark.parametrize(("change", "said"), FOREIGN.values(), ids=FOREIGN)
def test_a_comparison_of_something_else_is_refused(
    place: Path, prepared: Path, signer: Signer, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    document = comparison(place, prepared)
    change(document)
    assert said in refused(prepared, signer, replace(OPTIONS, compared=read_record(document, where="record")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(identical=True), "contradict each other or `identical`"),
        (lambda d: d["tensors"].update(differing=0), "contradict each other or `identical`"),
        (lambda d: d["tensors"].update(differing=10**9), "contradict each other or `identical`"),
        (lambda d: d.update(errors=[]), "other tensors in `errors` than are counted"),
        (lambda d: d["errors"].append(d["errors"][0]), "other tensors in `errors` than are counted"),
        (lambda d: d["total"].update(differing=10**15), "more elements that differ than elements"),
        (lambda d: d["total"].update(sqnr_db=1e308), "$.total.sqnr_db"),
        (lambda d: d["total"].update(relative_error=-1.0), "$.total.relative_error"),
        (lambda d: d["total"].update(largest_error=-1), "$.total.largest_error"),
        (lambda d: d["total"].update(worst="x" * 5000), "$.total.worst"),
        (lambda d: d["end_to_end"]["text"].update(top1_agreement=5.0), "$.end_to_end.text.top1_agreement"),
        (lambda d: d["end_to_end"]["text"].update(kl_mean=-3), "$.end_to_end.text.kl_mean"),
        (lambda d: d["end_to_end"]["text"].update(perplexity_b=0), "$.end_to_end.text.perplexity_b"),
        (lambda d: d["end_to_end"]["prompts"].update(same_answers=10**6), "more answers that are the same"),
        (lambda d: d["end_to_end"].update(versions={str(n): "" for n in range(65)}), "$.end_to_end.versions"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_are_no_comparison(
    place: Path, prepared: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    document = json.loads(json.dumps(comparison(place, prepared)))
    change(document)
    with pytest.raises(TonnageError, match=f"record: not a comparison; .*{re.escape(said)}"):
        read_record(document, where="record")


def test_what_is_no_comparison_is_refused(place: Path, prepared: Path, tonnage: Tonnage, tmp_path: Path) -> None:
    for content in ('{"schema": "tonnage.compare/2"}', json.dumps({**comparison(place, prepared), "total": {}}), "[]"):
        (tmp_path / "record").write_text(content)
        done = tonnage("export", prepared, "--key", place / "key.pem", "--compare", tmp_path / "record")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_same_inputs_give_the_same_bytes(place: Path, tmp_path: Path, signer: Signer) -> None:
    shutil.copytree(place / "small", tmp_path / "small")  # other times of files
    found = []
    for name in ("one", "two"):
        output = prepare_small(tmp_path / "small", tmp_path / name, window_bytes=65536 * (1 + len(found)))
        export_package(output, signer, OPTIONS)
        found.append(file_contents(output))
    assert found[0] == found[1]


def test_layout_hf_is_one_rank_that_holds_all_weights(place: Path, tmp_path: Path, signer: Signer) -> None:
    output = prepare_small(place / "small", tmp_path / "hf", tp=1, layout="hf", hash="sha256")
    exported = export_package(output, signer, OPTIONS)
    manifest = exported.package.manifest
    assert (manifest.layout, manifest.hash, manifest.ranks) == ("hf", "sha256", (0,))
    assert {file.path for file in manifest.by_rank()[0]} == {"model-00001-of-00001.safetensors"}
    found = {file.path: (file.digest, file.sha256) for file in manifest.files}
    assert found == {path: (sha256((output / path).read_bytes()).hexdigest(), None) for path in found}


def test_some_ranks_make_a_package_of_their_own(place: Path, tmp_path: Path, signer: Signer) -> None:
    output = prepare_small(place / "small", tmp_path / "some", ranks=(1,))
    manifest = export_package(output, signer, OPTIONS).package.manifest
    assert manifest.ranks == (1,)
    assert {file.rank for file in manifest.files} == {1, None}


# --- stock verification -----------------------------------------------------------------------------------------------


HOW: dict[str, dict[str, Any]] = {"blake3": {}, "sha256": {"hash": "sha256"}}


def stock(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command of model-signing."""
    command = Path(sys.executable).with_name("model_signing")
    return subprocess.run([command, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_stock_command_verifies_a_package(place: Path, tmp_path: Path, signer: Signer, how: dict[str, Any]) -> None:
    output = prepare_small(place / "small", tmp_path / "out", **how)
    export_package(output, signer, OPTIONS)
    words = ("verify", "key", output, "--signature", output / "model.sig", "--public_key", place / "key.pub.pem")
    done = stock(*words)
    assert done.returncode == 0, done.stderr
    raw = (output / RANK).read_bytes()
    (output / RANK).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    done = stock(*words)
    assert (done.returncode, RANK in done.stderr) == (1, True)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_stock_command_verifies_a_package_signed_with_a_certificate(
    place: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    key, root = (load_private_key(place / f"{name}.pem", None) for name in ("key", "other"))
    for name, certificate in (
        ("leaf", certify("signer", key, "root", root, authority=False)),
        ("root", certify("root", root, "root", root, authority=True)),
    ):
        (tmp_path / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    signer = load_signer(Key(path=place / "key.pem", certificate=tmp_path / "leaf.crt"))
    output = prepare_small(place / "small", tmp_path / "out", **how)
    export_package(output, signer, OPTIONS)
    words = ("verify", "certificate", output, "--signature", output / "model.sig")
    done = stock(*words, "--certificate_chain", tmp_path / "root.crt")
    assert done.returncode == 0, done.stderr
    (output / "config.json").write_bytes((output / "config.json").read_bytes() + b" ")
    assert stock(*words, "--certificate_chain", tmp_path / "root.crt").returncode == 1


def test_stock_library_verifies_a_package(place: Path, prepared: Path, signer: Signer) -> None:
    from model_signing import verifying

    export_package(prepared, signer, OPTIONS)
    config = verifying.Config().use_elliptic_key_verifier(public_key=place / "key.pub.pem")
    config.verify(prepared, prepared / "model.sig")
    (prepared / "more.txt").write_text("more")
    with pytest.raises(ValueError, match=r"more\.txt"):
        config.verify(prepared, prepared / "model.sig")


# --- other digests than those prepared with ---------------------------------------------------------------------------


def forget_sha256(document: Any) -> None:
    """Make a record as of a version that took one digest."""
    for file in (*document["files"], *(file for rank in document["ranks"] for file in rank["files"])):
        del file["sha256"]


def test_digests_on_record_are_not_taken_again(place: Path, prepared: Path, signer: Signer) -> None:
    """A preparation by BLAKE3 has SHA-256 as well, and makes a package by SHA-256 of files it does not look into."""
    raw = (prepared / RANK).read_bytes()
    (prepared / RANK).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    told: list[Any] = []
    exported = export_package(prepared, signer, Options(today="2026-11-30", hash="sha256"), on_progress=told.append)
    assert (exported.reread_bytes, told, exported.package.manifest.hash) == (0, [], "sha256")
    (prepared / RANK).write_bytes(raw)
    verify_package(prepared, PublicKey(path=place / "key.pub.pem")).check()
    assert json.loads((prepared / "provenance.json").read_bytes())["source"]["hash"] == "blake3"


@pytest.mark.parametrize(
    ("how", "hash_name"),
    [({"hash": "sha256"}, "blake3"), ({}, "blake3"), ({}, "sha256")],
    ids=["sha256", "old", "both"],
)
def test_digests_that_are_not_on_record_are_taken_once_more(
    place: Path, tmp_path: Path, signer: Signer, how: dict[str, Any], hash_name: Any
) -> None:
    output = prepare_small(place / "small", tmp_path / "out", **how)
    edit(output / "prepare.json", forget_sha256)
    if not how:
        said = f"no SHA-256 of {len(file_contents(output)) - 1} files on record; prepare again, or let export read"
        assert said in refused(output, signer)
    nbytes = sum(map(len, file_contents(output).values())) - (output / "prepare.json").stat().st_size
    told: list[Any] = []
    exported = export_package(output, signer, Options(today="2026-11-30", hash=hash_name), on_progress=told.append)
    assert exported.reread_bytes == nbytes == told[-1].done_bytes == told[-1].total_bytes
    assert exported.package.manifest.hash == hash_name
    verify_package(output, PublicKey(path=place / "key.pub.pem")).check()
    assert not export_package(output, signer, OPTIONS).changed
    other = Options(today="2026-11-30", hash="sha256" if hash_name == "blake3" else "blake3")
    assert "already packaged" in refused(output, signer, other)


def test_a_file_read_once_more_must_be_the_one_on_record(place: Path, tmp_path: Path, signer: Signer) -> None:
    output = prepare_small(place / "small", tmp_path / "out", hash="sha256")
    for path in (RANK, "config.json"):
        raw = (output / path).read_bytes()
        (output / path).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    found = refused(output, signer, Options(today="2026-11-30", hash="blake3")).splitlines()
    assert [line.partition("; expected sha256 ")[0] for line in found] == [
        "config.json: not as it was written",
        f"{RANK}: not as it was written",
    ]


def test_the_command_says_that_files_were_read_again(tonnage: Tonnage, place: Path, prepared: Path) -> None:
    edit(prepared / "prepare.json", forget_sha256)
    words = ("export", prepared, "--key", place / "key.pem", "--date", "2026-11-30")
    done = tonnage(*words)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    done = tonnage(*words, "--hash", "blake3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(" were read once more, to take or to check digests\n")
    assert len(done.stderr.splitlines()) == 1
    assert tonnage("verify", prepared, "--key", place / "key.pub.pem").returncode == 0


# --- what is read -----------------------------------------------------------------------------------------------------

COUNT = """
import os, sys
from pathlib import Path
from tonnage.export.io import export_package
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

def read():
    return int(Path("/proc/self/io").read_text().split()[1])

first, second, key = map(Path, sys.argv[1:])
signer, options = load_signer(Key(path=key)), Options(today="2026-11-30")
export_package(first, signer, options)  # all modules are loaded then
opened = []
sys.addaudithook(lambda event, args: opened.append(os.path.basename(str(args[0]))) if event == "open" else None)
sys.addaudithook(lambda event, args: opened.append("mapped") if event.startswith("mmap.__new__") else None)
before = read()
export_package(second, signer, options)
print(read() - before, sum(name.endswith(".safetensors") for name in opened), "mapped" in opened)
"""


def test_no_weight_is_read_again(place: Path, prepared: Path, tmp_path: Path) -> None:
    weights = list(prepared.rglob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in weights)
    payload = sum(path.stat().st_size for path in weights) - headers
    other = shutil.copytree(prepared, tmp_path / "other")
    done = subprocess.run(
        [sys.executable, "-c", COUNT, other, prepared, place / "key.pem"], capture_output=True, text=True, check=True
    )
    read, opened, mapped = done.stdout.split()
    small = sum(len(raw) for path, raw in file_contents(prepared).items() if not path.endswith(".safetensors"))
    most = headers + 2 * small + 65_536
    assert payload > 5 * most
    assert int(read) < most
    assert (int(opened), mapped) == (len(weights), "False")


# --- again ------------------------------------------------------------------------------------------------------------


def test_a_finished_package_is_left_alone(prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()}
    again = export_package(prepared, signer, Options(today="2027-01-01"))
    assert not again.changed
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()} == before


def test_a_finished_package_is_signed_with_another_key(place: Path, prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    before = file_contents(prepared)
    other = load_signer(Key(path=place / "other.pem"))
    assert export_package(prepared, other, OPTIONS).changed
    after = file_contents(prepared)
    signed = read_signature(after.pop("model.sig"), PublicKey(path=place / "other.pub.pem"))
    assert signed == read_signature(before.pop("model.sig"), PublicKey(path=place / "key.pub.pem"))
    assert after == before


PROFILE = SavedProfile(name="c4-p4096", concurrency=4, prefill_chunk_tokens=4096, draft_name="draft", draft_tokens=3)


def test_a_finished_package_is_not_made_another(prepared: Path, signer: Signer) -> None:
    made = Options(today="2026-11-30", profile=PROFILE)
    assert export_package(prepared, signer, made).package.manifest.name == "llama-tp2-c4-p4096-draft-k3-20261130"
    for same in (made, Options(today="2027-01-01", profile=PROFILE), Options(today="2027-01-01", date="2026-11-30")):
        assert not export_package(prepared, signer, same).changed
    for other, said in (
        (
            Options(today="2026-11-30", date="2026-12-01"),
            "expected llama-tp2-c4-p4096-draft-k3-20261201; found llama-tp2-c4-p4096-draft-k3-20261130",
        ),
        (Options(today="2026-11-30", name="mine"), "its name cannot change; prepare again, into another directory"),
        (Options(today="2026-11-30", name="mine"), "expected mine; found llama-tp2-c4-p4096-draft-k3-20261130"),
        (Options(today="2026-11-30", profile=SavedProfile(concurrency=8)), "expected llama-tp2-c8"),
        (Options(today="2026-11-30", profile=SavedProfile(context_tokens=9)), "plan.json: already packaged"),
        (Options(today="2026-11-30", hash="sha256"), "the hash of its digests cannot change"),
        (Options(today="2026-11-30", hash="sha256"), "expected sha256; found blake3"),
        (Options(today="2026-11-30", added={"README.md": b"# Card"}), "README.md: already packaged: its files"),
    ):
        assert said in refused(prepared, signer, other)


# --- files that are added -----------------------------------------------------------------------------------------------


def test_an_added_file_is_listed_signed_and_named(
    tonnage: Tonnage, place: Path, prepared: Path, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_bytes(b"# Card\n")
    (tmp_path / "NOTICE").write_bytes(b"")
    words = ("--key", place / "key.pem", "--date", "2026-11-30")
    words += ("--add", tmp_path / "README.md", "--add", tmp_path / "NOTICE")
    assert exported(prepared, *words)["changed"]
    assert (prepared / "README.md").read_bytes() == b"# Card\n"
    manifest = parse_manifest((prepared / "manifest.json").read_bytes())
    listed = {file.path: (file.nbytes, file.sha256, file.rank) for file in manifest.files}
    assert listed["README.md"] == (7, sha256(b"# Card\n").hexdigest(), None)
    assert listed["NOTICE"] == (0, sha256(b"").hexdigest(), None)
    assert json.loads((prepared / "provenance.json").read_bytes())["added"] == ["NOTICE", "README.md"]
    done = stock(
        "verify", "key", prepared, "--signature", prepared / "model.sig", "--public_key", place / "key.pub.pem"
    )
    assert done.returncode == 0, done.stderr
    verify_package(prepared, PublicKey(path=place / "key.pub.pem")).check()
    assert not exported(prepared, *words)["changed"]
    assert not exported(prepared, *words[:4])["changed"]
    (tmp_path / "README.md").write_bytes(b"# Other\n")
    done = tonnage("export", prepared, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("tonnage: README.md: already packaged: its files cannot change; ")


def test_an_added_file_that_is_there_is_the_same_or_refused(prepared: Path, signer: Signer) -> None:
    raw = (prepared / "config.json").read_bytes()
    assert "config.json: another file of this name is here" in refused(
        prepared, signer, Options(today="2026-11-30", added={"config.json": raw + b" "})
    )
    export_package(prepared, signer, Options(today="2026-11-30", added={"config.json": raw}))
    assert json.loads((prepared / "provenance.json").read_bytes())["added"] == []
    assert (prepared / "config.json").read_bytes() == raw


def test_an_export_that_ended_after_adding_goes_on(prepared: Path, signer: Signer) -> None:
    options = Options(today="2026-11-30", added={"README.md": b"# Card"})
    whole = shutil.copytree(prepared, prepared.with_name("whole"))
    export_package(whole, signer, options)
    for name in ("README.md", "plan.json"):
        shutil.copy(whole / name, prepared / name)
    (prepared / ".README.md.whole.partial").write_bytes(b"#")
    assert "README.md" in refused(prepared, signer)
    export_package(prepared, signer, options)
    assert file_contents(prepared) == file_contents(whole)


@pytest.mark.parametrize("name", [
    "manifest.json", "plan.json", "provenance.json", "prepare.json", "model.sig", "tonnage-slots.json", ".gitattributes",
    "model.safetensors", "model.safetensors.index.json", "code.py", "weights.bin", "a\nb", "back\\slash",
])  # fmt: skip
def test_names_that_are_not_added(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(TonnageError, match="not a name of a file to add") as caught:
        read_added([tmp_path / name])
    assert str(caught.value).isprintable()


def test_only_small_regular_files_are_added(tmp_path: Path) -> None:
    (tmp_path / "folder.md").mkdir()
    os.mkfifo(tmp_path / "pipe.md")
    with (tmp_path / "large.md").open("wb") as file:
        file.truncate((64 << 20) + 1)
    (tmp_path / "a.md").write_bytes(b"a")
    for name in ("folder.md", "pipe.md", "large.md", "absent.md"):
        with pytest.raises(TonnageError, match=name):
            read_added([tmp_path / name])
    with pytest.raises(TonnageError, match="two files of one name"):
        read_added([tmp_path / "a.md", tmp_path / "folder.md" / ".." / "a.md"])
    assert read_added([tmp_path / "a.md"]) == {"a.md": b"a"}


# --- in a repository ----------------------------------------------------------------------------------------------------


def test_a_package_comes_back_from_a_hub_as_it_was(place: Path, prepared: Path, signer: Signer) -> None:
    """What git and huggingface_hub leave beside it is no part of it: for export, verify and the stock command."""
    for path in (
        ".git/HEAD",
        ".github/a.yml",
        ".cache/huggingface/download/a.metadata",
        ".gitattributes",
        ".gitignore",
    ):
        (prepared / path).parent.mkdir(parents=True, exist_ok=True)
        (prepared / path).write_text("a")
    package = export_package(prepared, signer, OPTIONS).package
    assert not {path for path in package.signed.digests if path.startswith(".")}
    words = ("verify", "key", prepared, "--signature", prepared / "model.sig", "--public_key", place / "key.pub.pem")
    done = stock(*words)
    assert done.returncode == 0, done.stderr
    verify_package(prepared, PublicKey(path=place / "key.pub.pem")).check()
    assert not export_package(prepared, signer, OPTIONS).changed
    (prepared / ".cache/other").write_text("a")
    assert stock(*words).returncode == 1
    assert ".cache/other" in refused(prepared, signer)


def test_prepare_refuses_a_package(place: Path, prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    before = file_contents(prepared)
    for more in ([], ["--force"]):
        words = ["prepare", str(place / "small"), "--tp", "2", "--convert", "mxfp8", "-o", str(prepared), *more]
        done = CliRunner().invoke(app, words)
        assert "a finished package" in str(done.exception)
    assert file_contents(prepared) == before


def test_prepare_takes_what_an_interrupted_export_left_for_its_own(
    place: Path, prepared: Path, signer: Signer, tonnage: Tonnage
) -> None:
    """Killed before ``prepare.json`` went: the documents are there, one more under a temporary name, and the lock."""
    before = file_contents(prepared)
    package = shutil.copytree(prepared, prepared.with_name("package"))
    export_package(package, signer, OPTIONS)
    for name in DOCUMENTS:
        shutil.copy(package / name, prepared / name)
    left = ("model.sig", "plan.json")
    for name in left:
        (prepared / f".{name}.whole.partial").write_text("{")
    (prepared / ".prepare").mkdir()
    (prepared / ".prepare" / "lock").write_text("1\n")
    words = ("prepare", place / "small", "--tp", 2, "--convert", "mxfp8", "-o", prepared, "--json")
    done = tonnage(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(before["prepare.json"])
    assert "--force starts over" in tonnage(*words, "--hash", "sha256").stderr
    assert file_contents(prepared).keys() >= DOCUMENTS
    done = tonnage(*words, "--force")
    assert done.returncode == 0, done.stderr
    after = file_contents(prepared)
    assert after.keys() == before.keys()
    assert all(after[path] == raw for path, raw in before.items() if path != "prepare.json")


def test_prepare_takes_documents_without_a_record_for_somebody_elses(
    place: Path, tmp_path: Path, tonnage: Tonnage
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text("{}")
    done = tonnage("prepare", place / "small", "--tp", 2, "-o", tmp_path / "out", "--force")
    assert done.returncode == 2
    assert "output is in use" in done.stderr
    assert (tmp_path / "out" / "plan.json").read_text() == "{}"


# --- where ------------------------------------------------------------------------------------------------------------


def test_package_is_moved_to_its_name(prepared: Path, tmp_path: Path, signer: Signer) -> None:
    (tmp_path / "kept").mkdir()
    exported = export_package(prepared, signer, OPTIONS, into=tmp_path / "kept")
    goal = tmp_path / "kept" / "llama-tp2-20261130"
    assert exported.path == goal
    assert not prepared.exists()
    assert (goal / "model.sig").is_file()
    again = export_package(goal, signer, OPTIONS, into=tmp_path / "kept")
    assert (again.changed, again.moved, again.path) == (False, False, goal)


def test_the_command_says_where_a_finished_package_went(tonnage: Tonnage, place: Path, prepared: Path) -> None:
    (prepared.parent / "kept").mkdir()
    words = ("export", prepared, "--key", place / "key.pem", "--date", "2026-11-30")
    assert tonnage(*words).stderr == ""
    done = tonnage(*words, "--into", prepared.parent / "kept")
    assert done.stderr == f"moved to {prepared.parent / 'kept' / 'llama-tp2-20261130'}\n"


def test_nothing_is_moved_over_anything_or_into_itself(prepared: Path, tmp_path: Path, signer: Signer) -> None:
    goal = tmp_path / "llama-tp2-20261130"
    goal.mkdir()
    assert "exists already" in refused(prepared, signer, into=tmp_path)
    goal.rmdir()
    goal.symlink_to("nowhere")
    assert "exists already" in refused(prepared, signer, into=tmp_path)
    assert "inside the package" in refused(prepared, signer, into=prepared / "weights")
    assert "no such directory" in refused(prepared, signer, into=tmp_path / "absent")
    assert "on another file system" in refused(prepared, signer, into=Path("/proc"))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_no_complete_preparation_is_refused(place: Path, tmp_path: Path, signer: Signer) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither a preparation nor a package" in refused(tmp_path / "empty", signer)
    assert "neither a preparation nor a package" in refused(place / "small", signer)
    assert "no such directory" in refused(tmp_path / "absent", signer)
    begun = tmp_path / "begun"
    (begun / ".prepare").mkdir(parents=True)
    (begun / ".prepare" / "journal.jsonl").write_text("{}\n")
    assert "preparation is not complete; run `tonnage prepare` again" in refused(begun, signer)
    (begun / "manifest.json").write_text("{}")
    assert "preparation is not complete" in refused(begun, signer)


def test_files_that_are_not_as_recorded_are_named(prepared: Path, signer: Signer) -> None:
    with (prepared / RANK).open("ab") as stream:
        stream.write(b"x")
    (prepared / "tokenizer.json").unlink()
    (prepared / "notes.txt").write_text("mine")
    (prepared / "link").symlink_to("config.json")
    (prepared / "folder").mkdir()
    said = refused(prepared, signer)
    size = (prepared / RANK).stat().st_size
    assert f"{RANK}: not as it was written; expected {size - 1} bytes; found {size} bytes" in said
    assert "1 file missing: tokenizer.json" in said
    assert "notes.txt" in said
    assert "link: not a regular file" in said
    assert "folder" in said


def test_links_in_place_of_documents_are_not_followed(prepared: Path, tmp_path: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    (prepared / "manifest.json").rename(tmp_path / "elsewhere.json")
    (prepared / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    assert "a link" in refused(prepared, signer)


def test_what_an_ended_preparation_left_of_its_journal_goes(prepared: Path, signer: Signer) -> None:
    (prepared / ".prepare").mkdir()
    for name in ("journal.jsonl", "outputs.json", "lock"):
        (prepared / ".prepare" / name).write_text("")
    export_package(prepared, signer, OPTIONS)
    assert not (prepared / ".prepare").exists()


def test_a_manifest_with_another_sha256_of_a_document_is_not_signed_again(prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    listed = sha256((prepared / "plan.json").read_bytes()).hexdigest().encode()
    manifest = prepared / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(listed, b"0" * 64))
    assert f"plan.json: not the one of the manifest; expected {'0' * 64}" in refused(prepared, signer)


def test_a_file_of_a_finished_package_that_changed_is_named(prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, OPTIONS)
    plan = (prepared / "plan.json").read_bytes()
    (prepared / "plan.json").write_bytes(plan.replace(b'"tp":2', b'"tp":4'))
    assert "plan.json: not the one of the manifest" in refused(prepared, signer)
    (prepared / "plan.json").write_bytes(plan)
    with (prepared / RANK).open("ab") as stream:
        stream.write(b"x")
    assert f"{RANK}: not as it was written" in refused(prepared, signer)


def swap_digest(document: Any) -> None:
    document["ranks"][0]["files"][0]["digest"] = "0" * 63


def change_payload(document: Any) -> None:
    document["ranks"][0]["files"][0]["payload_bytes"] -= 1


def move_file(document: Any) -> None:
    first, second = (rank["files"] for rank in document["ranks"])
    first[0]["path"], second[0]["path"] = second[0]["path"], first[0]["path"]
    first[0]["file_bytes"], second[0]["file_bytes"] = second[0]["file_bytes"], first[0]["file_bytes"]


RECORDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no plan": (lambda d: d.pop("plan"), "no plan on record"),
    "plan of another checkpoint": (lambda d: d["plan"]["checkpoint"].update(digest="x"), "plan of another checkpoint"),
    "plan of another topology": (lambda d: d["plan"]["topology"].update(tp=4), "plan of another topology; expected tp2"),
    "plan of another engine": (lambda d: d["plan"].update(engine="vllm"), "plan of another engine; expected split"),
    "plan of no conversion": (lambda d: d["plan"]["numerics"].update(converted=[]), "plan of another conversion"),
    "plan of fewer bytes": (
        lambda d: d["plan"]["ranks"][0].update(payload_bytes=1),
        "written for rank 0; expected 1 bytes, as planned",
    ),
    "plan of less": (lambda d: d["plan"]["ranks"][0].update(weights_bytes=1), "weights_bytes of rank 0"),
    "plan of fewer ranks": (lambda d: d["plan"]["ranks"].pop(), "weights_bytes of rank 1"),
    "no plan at all": (lambda d: d.update(plan={"schema": "x"}), "not a plan"),
    "layout": (lambda d: d["identity"].update(layout="pp"), "unknown layout"),
    "other layout": (lambda d: d["identity"].update(layout="hf"), "a file that is not in layout"),
    "hash": (lambda d: d["identity"].update(hash="md5"), "unknown hash"),
    "topology": (lambda d: d["identity"].update(topology="tp4 ep1 pp1"), "a file that is not in layout"),
    "topology unread": (lambda d: d["identity"].update(topology="tp2"), "topology or recipe"),
    "conversion": (lambda d: d["identity"].update(convert="nvfp4"), "unknown conversion"),
    "ranks": (lambda d: d["identity"].update(ranks=[0]), "ranks are not those prepared"),
    "digest": (swap_digest, "not a manifest"),
    "payload": (change_payload, "header does not hold what was written"),
    "swapped ranks": (move_file, "a file that is not in layout"),
    "up": (lambda d: d["files"][0].update(path="../config.json"), "missing: ../config.json"),
    "deep": (lambda d: d.update(plan=json.loads('{"a":' * 400 + "1" + "}" * 400)), "not a plan"),
    "no record": (lambda d: d.clear(), "not the summary of a preparation"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), RECORDS.values(), ids=RECORDS)
def test_record_that_cannot_be_is_refused(
    prepared: Path, signer: Signer, change: Callable[[Any], object], said: str
) -> None:
    edit(prepared / "prepare.json", change)
    assert said in refused(prepared, signer)


def test_scales_that_engines_read_by_value_are_refused(prepared: Path, signer: Signer) -> None:
    call_scales(prepared / RANK)

    def resize(document: Any) -> None:
        (file,) = document["ranks"][0]["files"]
        file["file_bytes"] = (prepared / RANK).stat().st_size

    edit(prepared / "prepare.json", resize)
    said = f"{RANK}: model.layers.0.mlp.down_proj.weight_scale: scale of MXFP8 that engines convert by value"
    assert said in refused(prepared, signer)


def test_record_that_nests_without_end_is_refused(prepared: Path, signer: Signer) -> None:
    (prepared / "prepare.json").write_bytes(b'{"plan":' + b'{"a":' * 200_000)
    assert "not the summary of a preparation" in refused(prepared, signer)


def test_a_file_called_as_a_document_is_refused(prepared: Path, signer: Signer) -> None:
    def rename(document: Any) -> None:
        next(file for file in document["files"] if file["path"] == "tokenizer.json")["path"] = "plan.json"

    (prepared / "tokenizer.json").rename(prepared / "plan.json")
    edit(prepared / "prepare.json", rename)
    assert "plan.json: a file of the checkpoint is called as one that every package has" in refused(prepared, signer)


def test_signature_beside_a_record_is_a_stranger(prepared: Path, signer: Signer) -> None:
    (prepared / "model.sig").write_text("{}")
    assert "not of this package: model.sig" in refused(prepared, signer)


def test_prepare_and_export_never_run_at_once(prepared: Path, signer: Signer) -> None:
    (prepared / ".prepare").mkdir()
    with locked(prepared / ".prepare" / "lock"):
        assert "another preparation is writing here" in refused(prepared, signer)
    assert export_package(prepared, signer, OPTIONS).changed


def test_signer_that_fails_leaves_the_preparation(prepared: Path) -> None:
    def fail(_: Any) -> bytes:
        raise TonnageError

    refused(prepared, Signer(method="key", identity=None, sign=fail))
    assert (prepared / "prepare.json").exists()


def test_directory_that_cannot_be_written_is_a_refusal(prepared: Path, signer: Signer) -> None:
    (prepared / ".manifest.json.whole.partial").mkdir()
    assert "manifest.json" in refused(prepared, signer)


# --- plans and names --------------------------------------------------------------------------------------------------


def test_plan_of_the_user_takes_the_place_of_the_recorded(place: Path, prepared: Path, signer: Signer) -> None:
    words = (
        "--tp",
        "2",
        "--convert",
        "mxfp8",
        "--supply",
        "1GiB",
        "--profile",
        "c2-p512",
        "--context",
        "1024",
        "--json",
    )
    document = planned(place / "small", *words)
    exported = export_package(prepared, signer, Options(today="2026-11-30", plan=document))
    assert json.loads((prepared / "plan.json").read_bytes()) == document
    assert exported.package.manifest.name == "llama-tp2-c2-p512-20261130"


def test_plan_of_something_else_is_refused(place: Path, prepared: Path, signer: Signer) -> None:
    for words, said in (
        (("--tp", "2"), "--plan: plan of another conversion; expected mxfp8; found none"),
        (("--tp", "1", "--convert", "mxfp8"), "--plan: plan of another topology"),
        (("--tp", "2", "--engine", "vllm", "--convert", "mxfp8"), "--plan: plan of another engine"),
    ):
        options = Options(today="2026-11-30", plan=planned(place / "small", *words))
        assert said in refused(prepared, signer, options)


def test_profile_goes_into_plan_and_name(prepared: Path, signer: Signer) -> None:
    export_package(prepared, signer, Options(today="2026-11-30", profile=PROFILE, date="2025-01-02", name="my.Model_1"))
    profile = json.loads((prepared / "plan.json").read_bytes())["profile"]
    assert {**profile, "kv_dtype": None, "context_tokens": None} == {
        "name": "c4-p4096", "concurrency": 4, "prefill_chunk_tokens": 4096, "context_tokens": None, "kv_dtype": None,
        "draft_name": "draft", "draft_tokens": 3,
    }  # fmt: skip
    assert json.loads((prepared / "manifest.json").read_bytes())["name"] == "my.Model_1"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-a", ".a", "a b", "a\n", "é", "a" * 129, "a\0"])
def test_names_that_are_not_plain_are_refused(prepared: Path, signer: Signer, name: str) -> None:
    assert "not the name of a package" in refused(prepared, signer, Options(today="2026-11-30", name=name))


# --- the command ------------------------------------------------------------------------------------------------------


def exported(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["export", *map(str, words), "--json"])
    assert done.exit_code == 0, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_command_says_what_it_made(tonnage: Tonnage, place: Path, prepared: Path) -> None:
    words = ("--date", "2026-11-30", "--profile", "C4-P4096", "--draft-name", "eagle", "--draft-tokens", 3)
    document = exported(prepared, "--key", place / "key.pem", *words)
    files = file_contents(prepared)
    assert document == {
        "schema": "tonnage.export/1",
        "path": str(prepared),
        "name": "llama-tp2-c4-p4096-eagle-k3-20261130",
        "hash": "blake3",
        "reread_bytes": 0,
        "manifest_sha256": sha256(files["manifest.json"]).hexdigest(),
        "files": len(files),
        "bytes": sum(map(len, files.values())),
        "signer": {"method": "key", "identity": sha256((place / "key.pub.pem").read_bytes()).hexdigest()},
        "changed": True,
        "moved": False,
        "uploaded": None,
    }
    done = tonnage("export", prepared, "--key", place / "key.pem")
    assert done.returncode == 0
    assert "llama-tp2-c4-p4096-eagle-k3-20261130" in done.stdout
    assert done.stderr == "nothing was written: it was packaged and signed so before\n"


def test_date_of_the_build_environment_is_taken(monkeypatch: pytest.MonkeyPatch, place: Path, prepared: Path) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert exported(prepared, "--key", place / "key.pem")["name"] == "llama-tp2-19700102"


def test_password_comes_from_the_environment(
    tonnage: Tonnage, monkeypatch: pytest.MonkeyPatch, place: Path, prepared: Path, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    from tonnage.export.keys import load_private_key

    locked_key = load_private_key(place / "key.pem", None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked.pem").write_bytes(locked_key)
    monkeypatch.setenv("KEY_PASSWORD", "secret")
    words = (prepared, "--key", tmp_path / "locked.pem")
    done = tonnage("export", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "key is encrypted" in done.stderr
    assert exported(*words, "--password-env", "KEY_PASSWORD")["signer"]["method"] == "key"


def test_example_of_the_help_runs(
    tonnage: Tonnage, monkeypatch: pytest.MonkeyPatch, place: Path, prepared: Path, tmp_path: Path
) -> None:
    shutil.copy(place / "key.pem", tmp_path)
    example = " ".join(tonnage("export", "--help").stdout.split()).split("Example: tonnage ")[1].split(" Arguments:")[0]
    monkeypatch.chdir(tmp_path)
    assert exported(*example.split()[1:])["path"] == prepared.name


WORDS = {
    "nothing to sign with": ([], "--key: nothing to sign with"),
    "two ways": (["--key", "KEY", "--sigstore"], "--key, --sigstore: both given"),
    "certificate alone": (["--certificate", "x"], "belong to a key"),
    "chain alone": (["--key", "KEY", "--chain", "x"], "--chain: belongs to a certificate"),
    "token alone": (["--key", "KEY", "--identity-token-env", "X"], "belong to Sigstore"),
    "no such variable": (["--key", "KEY", "--password-env", "NO_SUCH_X"], "no such variable in the environment"),
    "no such key": (["--key", "absent.pem"], "absent.pem: cannot be read"),
    "public key": (["--key", "PUB"], "not a private key"),
    "name": (["--key", "KEY", "--name", "../x"], "--name: not the name of a package"),
    "draft": (["--key", "KEY", "--draft-name", "a/b"], "--draft-name: not the name"),
    "date": (["--key", "KEY", "--date", "tomorrow"], "--date: not a date"),
    "profile": (["--key", "KEY", "--profile", "fast"], "--profile: not a profile"),
    "plan": (["--key", "KEY", "--plan", "KEY"], "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), WORDS.values(), ids=WORDS)
def test_command_refuses_in_one_line(place: Path, prepared: Path, words: list[str], said: str) -> None:
    paths = {"KEY": str(place / "key.pem"), "PUB": str(place / "key.pub.pem")}
    before = file_contents(prepared)
    done = CliRunner().invoke(app, ["export", str(prepared), *(paths.get(word, word) for word in words)])
    assert isinstance(done.exception, TonnageError), done.output
    assert said in str(done.exception)
    assert len(done.exception.problems) == 1
    assert file_contents(prepared) == before


# --- killed, and out of room ------------------------------------------------------------------------------------------

KILLS = """
import os, shutil, signal, sys
from pathlib import Path
from tonnage.export.io import export_package
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

prepared, work, key = map(Path, sys.argv[1:])
signer, options = load_signer(Key(path=key)), Options(today="2026-11-30")
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}

def export(name, moments):
    child = os.fork()
    if not child:
        left = [moments]
        def hook(event, args):
            if event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        export_package(work / name, signer, options)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

shutil.copytree(prepared, work / "whole")
export_package(work / "whole", signer, options)  # all modules are loaded then
whole, before = contents(work / "whole"), contents(prepared)
states = []
for moments in range(1000):
    name = f"killed-{moments}"
    shutil.copytree(prepared, work / name)
    status = export(name, moments)
    found = contents(work / name)
    assert found.keys() >= before.keys() - {"prepare.json"} and "model.sig" not in found or found == whole, found.keys()
    states.append(("prepare.json" in found) + 2 * ("manifest.json" in found) + 4 * ("model.sig" in found))
    assert export(name, moments // 2) in (0, -signal.SIGKILL)  # and killed again on the way
    assert export(name, 1 << 30) == 0
    assert contents(work / name) == whole and not (work / name / ".prepare").exists()
    shutil.rmtree(work / name)
    if status == 0:
        break
print(moments, *sorted(set(states)))
"""


def test_killed_anywhere_it_is_no_package_until_it_is_whole(place: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS, place / "prepared", tmp_path, place / "key.pem"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moments, *states = map(int, done.stdout.split())
    assert moments >= 12
    assert states == [1, 2, 3, 4 + 2]  # nothing yet; record gone; record and manifest; whole


LIMITED = """
import resource, sys
from pathlib import Path
from tonnage.errors import TonnageError
from tonnage.export.io import export_package
from tonnage.export.package import Options
from tonnage.export.sign import Key, load_signer

directory, key, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
signer = load_signer(Key(path=key))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    export_package(directory, signer, Options(today="2026-11-30"))
except TonnageError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["plan.json", "model.sig"])
def test_without_room_it_stays_a_preparation_and_can_be_run_again(
    place: Path, prepared: Path, signer: Signer, name: str
) -> None:
    before = file_contents(prepared)
    whole = export_package(shutil.copytree(prepared, prepared.with_name("whole")), signer, OPTIONS)
    if name == "model.sig":  # the smaller one: as if killed before it
        for document in DOCUMENTS:
            shutil.copy(whole.path / document, prepared)
    nbytes = (whole.path / name).stat().st_size
    words = [sys.executable, "-c", LIMITED, prepared, place / "key.pem", str(nbytes - 1)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"{name}: file too large for the limit of this process" in done.stdout
    after = file_contents(prepared)
    assert after.keys() - DOCUMENTS == before.keys()
    export_package(prepared, signer, OPTIONS)
    assert file_contents(prepared) == file_contents(whole.path)
