"""``tonnage verify``: what it accepts, and that nothing else is accepted; every refusal names file and rank."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from packages import call_scales, make_package, put_certificates, sign_anew, sign_statement
from samples import LLAMA, certify, write_key
from tonnage.cli import app, main
from tonnage.errors import CheckpointError, Problem, UnitError
from tonnage.export.keys import KeyFileError
from tonnage.export.manifest import Manifest, Parallel, manifest_bytes, parse_manifest
from tonnage.export.signature import CertificateChain, PublicKey
from tonnage.export.verify import Verification, VerifyError, VerifyRequest, verify_package

Tonnage = Callable[..., subprocess.CompletedProcess[str]]
WEIGHTS = "weights/tp2/rank-{}/model-00001-of-00001.safetensors"
INDEX = "weights/tp2/rank-{}/model.safetensors.index.json"
FILES = sorted(
    ("config.json", "manifest.json", "model.sig", "plan.json", "provenance.json",
     *(form.format(rank) for form in (WEIGHTS, INDEX) for rank in (0, 1)))
)  # fmt: skip
SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def keys(home: Path) -> tuple[Path, Path]:
    """The signer's private and public key."""
    return write_key(home)


@pytest.fixture(scope="module")
def original(home: Path, keys: tuple[Path, Path]) -> Path:
    """A package of two ranks; not to be changed, or changed back."""
    return make_package(home / "package", keys[0], SMALL, "--tp", 2)


@pytest.fixture(scope="module")
def by_sha256(home: Path, keys: tuple[Path, Path]) -> Path:
    """Another, converted, with SHA-256 digests; not to be changed."""
    return make_package(home / "sha256", keys[0], SMALL, "--tp", 2, "--hash", "sha256", "--convert", "mxfp8")


@pytest.fixture
def package(original: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(original, tmp_path / "package")


@pytest.fixture
def check(keys: tuple[Path, Path]) -> Callable[..., Verification]:
    def verification(directory: Path, **request: Any) -> Verification:
        return verify_package(directory, PublicKey(path=keys[1]), VerifyRequest(**request))

    return verification


def lines(found: Verification) -> list[str]:
    """The problems of a package that must not be verified."""
    assert not found.verified
    with pytest.raises(VerifyError) as refusal:
        found.check()
    return str(refusal.value).splitlines()


# --- accepted ---------------------------------------------------------------------------------------------------------


def test_a_package_is_verified(original: Path, check) -> None:
    found = check(original)
    found.check()
    assert found.problems == () == found.unchecked
    assert found.ranks == (0, 1)
    assert found.files == len(FILES)
    assert found.nbytes == sum((original / path).stat().st_size for path in FILES)
    assert found.hashed_bytes == found.nbytes - (original / "model.sig").stat().st_size


def test_verifying_writes_nothing(original: Path, check) -> None:
    before = {path: path.stat().st_mtime_ns for path in [original, *original.rglob("*")]}
    check(original)
    assert before == {path: path.stat().st_mtime_ns for path in [original, *original.rglob("*")]}


def test_one_rank_is_verified_without_the_others(package: Path, check) -> None:
    shutil.rmtree(package / "weights/tp2/rank-0")
    found = check(package, ranks=(1,))
    found.check()
    assert found.ranks == (1,)
    assert found.unchecked == ("ranks not looked at: 0", "whether the parts of all ranks make whole tensors")


def test_other_ranks_are_not_looked_into(package: Path, check) -> None:
    (package / WEIGHTS.format(0)).write_bytes(b"other")
    (package / "weights/tp2/rank-0/more").write_bytes(b"")
    assert check(package, ranks=(1,)).verified
    assert lines(check(package, ranks=(0,)))


def test_fast_says_what_it_leaves_out(package: Path, check) -> None:
    flip(package / WEIGHTS.format(1), (package / WEIGHTS.format(1)).stat().st_size - 1, 0)
    found = check(package, fast=True)
    found.check()
    assert found.unchecked == ("contents of weight files, 2 in all: not hashed, sizes and headers only",)
    assert found.hashed_bytes < sum((package / WEIGHTS.format(rank)).stat().st_size for rank in (0, 1))
    assert lines(check(package))


def test_fast_reads_no_payload(package: Path, check, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    assert check(package, fast=True).verified
    headers = [8 + int.from_bytes((package / WEIGHTS.format(rank)).read_bytes()[:8], "little") for rank in (0, 1)]
    documents = [(package / path).stat().st_size for path in FILES if not path.endswith(".safetensors")]
    assert sum(reads) == sum(headers) + sum(documents)


@pytest.mark.parametrize(
    ("fields", "words", "how"),
    [
        (SMALL, ("--tp", "4", "--pp", "2", "--engine", "vllm"), {"scaled_down": False}),
        (SMALL, ("--layout", "hf", "--convert", "mxfp8"), {"sharded": True}),
        ({**SMALL, "model_type": "mixtral", "num_local_experts": 3}, ("--tp", "2", "--ep", "2"), {}),
        (SMALL, ("--tp", "2", "--ranks", "1"), {}),
    ],
    ids=["replicated heads, stages", "hf", "whole experts", "some ranks"],
)
def test_every_layout_is_verified(
    fields: dict[str, Any], words: tuple[str, ...], how: dict[str, Any], tmp_path: Path, keys, check
) -> None:
    check(make_package(tmp_path / "package", keys[0], fields, *words, **how)).check()


# --- flips ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    flip(path, at, bit)
    try:
        yield
    finally:
        flip(path, at, bit)


def places(path: Path, kind: str, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Yield random bits of a file: 60 anywhere in it, and where there is a header 20 in its length and 40 in itself."""
    nbytes = path.stat().st_size
    regions = [(60, 0, nbytes)]
    if kind.endswith(".safetensors"):
        payload = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        regions = [(20, 0, 8), (40, 8, payload), (60, payload, nbytes)]
    for count, begin, end in regions:
        yield from ((chance.randrange(begin, end), chance.randrange(8)) for _ in range(count))


@pytest.mark.parametrize("path", FILES)
def test_every_flipped_bit_is_found(path: str, original: Path, check) -> None:
    """Of all files together at least 500: 7 x 60 and 2 x 120."""
    rank = re.search(r"rank-(\d)", path)
    for at, bit in places(original / path, path, random.Random(path)):
        with flipped(original / path, at, bit):
            found = lines(check(original))
        assert len(found) == 1, (at, bit)
        assert found[0].startswith(f"{path}: "), (at, bit)
        assert rank is None or f"(rank {rank[1]})" in found[0]


def test_a_flipped_byte_shows_both_digests(original: Path, check) -> None:
    listed = {file.path: file.digest for file in parse_manifest((original / "manifest.json").read_bytes()).files}
    with flipped(original / "config.json", 5, 3):
        (line,) = lines(check(original))
    expected, found = re.fullmatch(r"config.json: .*; expected blake3 (\S+); found blake3 (\S+)", line).groups()  # type: ignore[union-attr]
    assert expected == listed["config.json"] != found


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_scales_that_engines_read_by_value_are_refused_whoever_signed_them(
    by_sha256: Path, tmp_path, keys, check
) -> None:
    foreign = shutil.copytree(by_sha256, tmp_path / "foreign")
    for rank in (0, 1):
        call_scales(foreign / WEIGHTS.format(rank))

    def resized(manifest: Manifest) -> Manifest:
        files = tuple(replace(file, nbytes=(foreign / file.path).stat().st_size) for file in manifest.files)
        return replace(manifest, files=files)

    sign_anew(foreign, keys[0], resized)
    found = check(foreign)
    named = {problem.where for problem in found.problems if problem.tensor and problem.tensor.endswith(".weight_scale")}
    assert named == {WEIGHTS.format(rank) for rank in (0, 1)}
    assert {(problem.expected, problem.found) for problem in found.problems} == {("U8, of the same bytes", "F8_E8M0")}


def test_a_shorter_and_a_longer_file_are_refused(package: Path, check) -> None:
    first, second = package / WEIGHTS.format(0), package / INDEX.format(1)
    nbytes = first.stat().st_size, second.stat().st_size
    os.truncate(first, nbytes[0] - 1)
    second.write_bytes(second.read_bytes() + b" ")
    expected = [
        f"{WEIGHTS.format(0)}: size (rank 0); expected {nbytes[0]} bytes; found {nbytes[0] - 1} bytes",
        f"{INDEX.format(1)}: size (rank 1); expected {nbytes[1]} bytes; found {nbytes[1] + 1} bytes",
    ]
    for fast in (False, True):
        assert lines(check(package, fast=fast)) == expected


@pytest.mark.parametrize("path", FILES)
def test_a_removed_file_is_missed(path: str, package: Path, check) -> None:
    (package / path).unlink()
    for fast in (False, True):
        (line,) = lines(check(package, fast=fast))
        assert "missing" in line
        assert path in line


def test_a_directory_without_a_signature_is_no_package_yet(package: Path, check) -> None:
    (package / "model.sig").unlink()
    assert lines(check(package)) == ["model.sig: missing: not a package; `tonnage export` makes one of a preparation"]


def test_missing_files_are_counted_and_named(package: Path, check) -> None:
    paths = ["config.json", INDEX.format(0), WEIGHTS.format(1)]
    for path in paths:
        (package / path).unlink()
    found = check(package)
    assert lines(found) == [f"3 files missing: {', '.join(paths)}"]
    assert [(problem.where, problem.what) for problem in found.problems] == [(path, "missing") for path in paths]


def put_in_a_repository(package: Path) -> list[str]:
    """Keep a package where hubs do; return what is no part of it."""
    for path in (".git/objects/pack", ".github/workflows", ".cache/huggingface/download"):
        (package / path).mkdir(parents=True)
    for path in (
        ".git/HEAD",
        ".github/workflows/a.yml",
        ".cache/huggingface/.gitignore",
        ".gitattributes",
        ".gitignore",
    ):
        (package / path).write_text("anything\n")
    (package / ".git/link").symlink_to("/etc/passwd")
    return [".cache/huggingface", ".git", ".gitattributes", ".github", ".gitignore"]


def test_a_package_in_a_repository_is_the_same_package(package: Path, check) -> None:
    ignored = put_in_a_repository(package)
    for request in ({}, {"ranks": (1,)}, {"fast": True}):
        found = check(package, **request)
        found.check()
        assert found.unchecked[0] == f"{', '.join(ignored)}: no part of a package, not looked at"


@pytest.mark.parametrize("path", [
    ".gitmodules", ".git2", "weights/.gitattributes", "weights/tp2/.git/HEAD", ".cache/other", ".cache/huggingface2",
    ".hidden", "git",
])  # fmt: skip
def test_nothing_else_is_left_out(path: str, package: Path, check) -> None:
    put_in_a_repository(package)
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / path).write_bytes(b"")
    assert lines(check(package))[0] == f"1 file not of this package: {path}"


@pytest.mark.parametrize("path", [".git", ".gitattributes", ".github", ".gitignore", ".cache", ".cache/huggingface"])
def test_links_and_pipes_of_names_that_are_left_out_are_refused(
    path: str, package: Path, tmp_path: Path, check
) -> None:
    (tmp_path / "else/huggingface").mkdir(parents=True)
    (package / path).parent.mkdir(exist_ok=True)
    (package / path).symlink_to(tmp_path / "else")
    assert f"{path}: not a regular file; expected files and directories only; found a link" in lines(check(package))
    (package / path).unlink()
    os.mkfifo(package / path)
    assert f"{path}: not a regular file; expected files and directories only; found a named pipe" in lines(
        check(package)
    )


def test_a_manifest_that_lists_what_is_left_out_is_refused(package: Path, keys, check) -> None:
    (package / ".git").mkdir()
    (package / ".git/HEAD").write_bytes(b"")

    def listed(manifest: Manifest) -> Manifest:
        return replace(manifest, files=(replace(manifest.files[0], path=".git/HEAD"), *manifest.files))

    sign_anew(package, keys[0], listed)
    assert ".git/HEAD: listed, and of a name that is not looked at" in lines(check(package))


def test_added_files_and_directories_are_refused(package: Path, check) -> None:
    (package / "weights/tp2/rank-1/extra.safetensors").write_bytes(b"")
    (package / ".hidden").write_bytes(b"")
    (package / "inner/empty").mkdir(parents=True)
    assert lines(check(package, fast=True)) == [
        "2 files not of this package: .hidden, weights/tp2/rank-1/extra.safetensors",
        "2 directories not of this package: inner, inner/empty",
    ]


def test_what_an_unfinished_export_leaves_is_refused(package: Path, check) -> None:
    (package / ".prepare").mkdir()
    (package / ".prepare/lock").write_bytes(b"")
    (package / "prepare.json").write_bytes(b"{}")
    assert lines(check(package)) == ["2 files not of this package: .prepare/lock, prepare.json"]


def test_links_are_refused_wherever_they_lead(package: Path, original: Path, check) -> None:
    (package / "config.json").unlink()
    (package / "config.json").symlink_to(original / "config.json")
    (package / "weights/more").symlink_to(original)
    shutil.rmtree(package / "weights/tp2/rank-1")
    (package / "weights/tp2/rank-1").symlink_to(original / "weights/tp2/rank-1")
    for request in ({}, {"fast": True}, {"ranks": (0,)}):
        found = lines(check(package, **request))
        assert [line.partition(":")[0] for line in found] == ["config.json", "weights/more", "weights/tp2/rank-1"]
        assert all(line.endswith("found a link") for line in found)


@pytest.mark.parametrize("path", ["manifest.json", "model.sig"])
def test_the_documents_of_trust_may_not_be_links(path: str, package: Path, original: Path, check) -> None:
    (package / path).unlink()
    (package / path).symlink_to(original / path)
    (line,) = lines(check(package))
    assert line.startswith(f"{path}: ")


def test_the_directory_itself_may_be_reached_by_a_link(original: Path, tmp_path: Path, check) -> None:
    (tmp_path / "latest").symlink_to(original)
    assert check(tmp_path / "latest").verified


@pytest.mark.parametrize("path", ["config.json", "model.sig", "manifest.json", WEIGHTS.format(0), "extra"])
def test_a_pipe_is_refused_and_never_waited_for(path: str, package: Path, check) -> None:
    (package / path).unlink(missing_ok=True)
    os.mkfifo(package / path)
    (line,) = lines(check(package))
    assert line.startswith(f"{path}: ")


@pytest.mark.parametrize("path", ["config.json", "model.sig", WEIGHTS.format(0)])
def test_a_directory_is_no_file(path: str, package: Path, check) -> None:
    (package / path).unlink()
    (package / path).mkdir()
    assert any(path in line for line in lines(check(package)))


@pytest.mark.parametrize(
    "name", ["two\nlines", "back\\slash", "\u202eright to left", b"\xff".decode(errors="surrogateescape")]
)
def test_names_that_do_not_print_are_refused_on_one_line(name: str, package: Path, check) -> None:
    (package / name).write_bytes(b"")
    (line,) = lines(check(package))
    assert line.isprintable()
    assert "not a name a package may have" in line


def test_a_file_that_shrinks_while_it_is_read_is_refused(package: Path, check, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = package / WEIGHTS.format(0), os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(descriptor), path.stat()) and offset:
            os.truncate(path, offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrinking)
    (line,) = lines(check(package))
    assert line.startswith(f"{WEIGHTS.format(0)}: truncated while it was read; ")


def test_what_cannot_be_read_is_a_problem_of_its_file(package: Path, check, monkeypatch: pytest.MonkeyPatch) -> None:
    path, preadv = package / WEIGHTS.format(1), os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    (line,) = lines(check(package))
    assert line.startswith(f"{WEIGHTS.format(1)}: cannot be read; ")
    assert line.endswith("found Input/output error")


# --- signature and manifest -------------------------------------------------------------------------------------------


def test_another_key_is_refused(original: Path, tmp_path: Path) -> None:
    found = verify_package(original, PublicKey(path=write_key(tmp_path)[1]))
    (line,) = lines(found)
    assert line.startswith("model.sig: signed with another key")
    assert found.manifest is found.signed is None


def test_a_signature_made_with_another_key_is_refused(package: Path, tmp_path: Path, check) -> None:
    sign_anew(package, write_key(tmp_path, "attacker")[0])
    assert lines(check(package))[0].startswith("model.sig: signed with another key")


def test_a_key_that_names_itself_as_the_right_one_is_refused(
    package: Path, original: Path, tmp_path: Path, check
) -> None:
    """The signature of an attacker under the hint of the signer."""
    hint = json.loads((original / "model.sig").read_bytes())["verificationMaterial"]
    sign_anew(package, write_key(tmp_path, "attacker")[0])
    bundle = json.loads((package / "model.sig").read_bytes())
    (package / "model.sig").write_text(json.dumps({**bundle, "verificationMaterial": hint}))
    assert lines(check(package))[0].startswith("model.sig: does not verify")


Certified = Callable[..., Verification]


@pytest.fixture
def certified(package: Path, keys: tuple[Path, Path], tmp_path: Path) -> Certified:
    """Verify the package under a certificate of its key by an authority that is trusted, unless it is another."""

    def verification(*, of_root: tuple[int, int] = (2018, 2030), own: bool = True, known: bool = True, **how: Any):
        root, stranger = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        signer = serialization.load_pem_private_key(keys[0].read_bytes(), None) if own else stranger
        put_certificates(package, certify("signer", signer, "root", root, authority=False, **how))
        trusted = root if known else stranger
        anchor = certify("root", trusted, "root", trusted, authority=True, years=of_root)
        (tmp_path / "root.pem").write_bytes(anchor.public_bytes(serialization.Encoding.PEM))
        return verify_package(package, CertificateChain(paths=(tmp_path / "root.pem",)))

    return verification


def test_a_certificate_of_a_trusted_authority_is_accepted(certified: Certified) -> None:
    certified().check()


CERTIFICATE_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an expired authority": ({"of_root": (2018, 2019)}, "certificate is not trusted; found .*expired"),
    "not for signing": ({"signs": False}, "certificate may not be used to sign"),
    "another authority": ({"known": False}, "certificate is not trusted"),
    "of another key": ({"own": False}, "does not verify"),
}


@pytest.mark.parametrize(("how", "expected"), CERTIFICATE_LIES.values(), ids=CERTIFICATE_LIES)
def test_other_certificates_are_refused(how: dict[str, Any], expected: str, certified: Certified) -> None:
    (line,) = lines(certified(**how))
    assert re.match(f"model.sig: {expected}", line)


def test_a_signature_by_key_is_none_by_certificate_and_the_other_way_round(
    package: Path, original: Path, keys: tuple[Path, Path], certified: Certified, tmp_path: Path
) -> None:
    certified().check()
    by_certificate = verify_package(package, PublicKey(path=keys[1]))
    assert lines(by_certificate)[0].startswith("model.sig: signed with a certificate, not with a key")
    by_key = verify_package(original, CertificateChain(paths=(tmp_path / "root.pem",)))
    assert lines(by_key) == ["model.sig: signed with a key, not with a chain of certificates"]


def test_the_signature_of_another_package_is_refused(package: Path, tmp_path: Path, keys, check) -> None:
    other = shutil.copytree(package, tmp_path / "other")
    (other / "config.json").write_bytes(b"{}")
    sign_anew(other, keys[0])
    shutil.copy(other / "model.sig", package)
    (line,) = lines(check(package))
    assert line.startswith("manifest.json: not the file that was signed; expected ")


def test_an_edited_manifest_is_refused(package: Path, check) -> None:
    """Consistent in itself, with the digest of a file that was changed."""
    raw = (package / "manifest.json").read_bytes()
    (package / "config.json").write_bytes(b"{}")
    manifest = parse_manifest(raw)
    files = [replace(file, nbytes=2) if file.path == "config.json" else file for file in manifest.files]
    (package / "manifest.json").write_bytes(manifest_bytes(replace(manifest, files=tuple(files))))
    (line,) = lines(check(package))
    assert line.startswith("manifest.json: not the file that was signed; ")


def test_a_signed_manifest_whose_paths_leave_the_package_is_refused(package: Path, tmp_path: Path, keys, check) -> None:
    (tmp_path / "outside.json").write_bytes(b"{}")
    manifest = parse_manifest((package / "manifest.json").read_bytes())
    digest = "0" * 64
    outside = replace(manifest.files[0], path="../outside.json", nbytes=2, digest=digest)
    raw = manifest_bytes(replace(manifest, files=tuple(sorted((outside, *manifest.files), key=lambda file: file.path))))
    (package / "manifest.json").write_bytes(raw)

    def state(statement: dict[str, Any]) -> None:
        for resource in statement["predicate"]["resources"]:
            if resource["name"] == "manifest.json":
                resource["digest"] = sha256(raw).hexdigest()

    sign_statement(package, keys[0], state)
    (line,) = lines(check(package))
    assert line == "manifest.json: not a path of a file in a package; found '../outside.json'"


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "a\nb", ""])
def test_a_signed_path_that_leaves_the_package_is_refused(path: str, package: Path, keys, check) -> None:
    def state(statement: dict[str, Any]) -> None:
        resources = statement["predicate"]["resources"]
        resources.append({**resources[0], "name": path})

    sign_statement(package, keys[0], state)
    (line,) = lines(check(package))
    assert line.startswith("model.sig: not a path of a file in a package; found ")


def test_files_signed_and_not_listed_or_listed_and_not_signed_are_refused(package: Path, keys, check) -> None:
    def state(statement: dict[str, Any]) -> None:
        for resource in statement["predicate"]["resources"]:
            if resource["name"] == "config.json":
                resource["name"] = "other.json"

    sign_statement(package, keys[0], state)
    assert lines(check(package)) == [
        "manifest.json: files listed and not signed; found config.json",
        "manifest.json: files signed and not listed; found other.json",
    ]


def test_a_signed_digest_that_is_not_the_listed_one_is_refused(package: Path, keys, check) -> None:
    def state(statement: dict[str, Any]) -> None:
        for resource in statement["predicate"]["resources"]:
            if resource["name"] == "plan.json":
                resource["digest"] = "0" * 64

    sign_statement(package, keys[0], state)
    (line,) = lines(check(package))
    assert line.startswith(f"manifest.json: not the signed digest of plan.json; expected {'0' * 64}; found ")


def test_digests_of_one_algorithm_do_not_pass_for_another(package: Path, keys, check) -> None:
    def one(statement: dict[str, Any]) -> None:
        statement["predicate"]["resources"][0]["algorithm"] = "blake3"

    sign_statement(package, keys[0], one)
    assert "by another algorithm; expected sha256; found blake3" in lines(check(package))[0]

    def every(statement: dict[str, Any]) -> None:
        statement["predicate"]["serialization"]["hash_type"] = "blake3"
        for resource in statement["predicate"]["resources"]:
            resource["algorithm"] = "blake3"

    sign_statement(package, keys[0], every)
    assert lines(check(package))[0].startswith("manifest.json: not the file that was signed; ")


def test_a_manifest_that_calls_its_digests_by_another_name_is_refused(package: Path, keys, check) -> None:
    def change(manifest: Manifest) -> Manifest:
        files = tuple(replace(file, sha256=None) for file in manifest.files)
        return replace(manifest, hash="sha256", files=files)

    sign_anew(package, keys[0], change)
    found = lines(check(package))
    contents = [path for path in FILES if path not in ("manifest.json", "model.sig")]
    assert [line.partition(":")[0] for line in found] == contents
    assert all("expected sha256 " in line for line in found)


def test_a_signature_by_the_other_algorithm_holds_for_every_file_too(
    by_sha256: Path, tmp_path: Path, keys, check
) -> None:
    """A manifest by SHA-256 under a signature by BLAKE3: each file must have both digests."""
    package = shutil.copytree(by_sha256, tmp_path / "package")

    def state(statement: dict[str, Any]) -> None:
        statement["predicate"]["serialization"]["hash_type"] = "blake3"
        for resource in statement["predicate"]["resources"]:
            resource["algorithm"] = "blake3"
            resource["digest"] = blake3((package / resource["name"]).read_bytes()).hexdigest()

    sign_statement(package, keys[0], state)
    check(package).check()

    def lie(statement: dict[str, Any]) -> None:
        for resource in statement["predicate"]["resources"]:
            if resource["name"] == "config.json":
                resource["digest"] = "0" * 64

    sign_statement(package, keys[0], lie)
    (line,) = lines(check(package))
    assert line.startswith(f"config.json: contents are not those signed; expected blake3 {'0' * 64}; found blake3 ")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"mediaType": 1}', b"[" * 100_000])
def test_a_signature_that_is_none_is_refused(content: bytes, package: Path, check) -> None:
    (package / "model.sig").write_bytes(content)
    assert all(line.startswith("model.sig: ") for line in lines(check(package)))


def test_a_signed_manifest_that_is_none_is_refused(package: Path, keys, check) -> None:
    raw = (package / "manifest.json").read_bytes()
    for content in (b"{}", raw + b"\n", raw.replace(b'"tp":2', b'"tp":3'), raw.replace(b'"ep":1', b'"ep":7')):
        (package / "manifest.json").write_bytes(content)

        def state(statement: dict[str, Any], content: bytes = content) -> None:
            for resource in statement["predicate"]["resources"]:
                if resource["name"] == "manifest.json":
                    resource["digest"] = sha256(content).hexdigest()

        sign_statement(package, keys[0], state)
        assert lines(check(package))


# --- what was signed makes no sense -----------------------------------------------------------------------------------


def swap_ranks(package: Path) -> None:
    folder = package / "weights/tp2"
    (folder / "rank-0").rename(folder / "rank-x")
    (folder / "rank-1").rename(folder / "rank-0")
    (folder / "rank-x").rename(folder / "rank-1")


def test_swapped_ranks_are_refused(package: Path, check) -> None:
    swap_ranks(package)
    for fast in (False, True):
        found = lines(check(package, fast=fast))
        for rank in (0, 1):
            assert any(line.startswith(WEIGHTS.format(rank)) and f"rank {rank}" in line for line in found)


def test_swapped_ranks_are_refused_though_they_are_signed(package: Path, keys, check) -> None:
    swap_ranks(package)
    sign_anew(package, keys[0])
    for request in ({}, {"fast": True}, {"ranks": (0,)}):
        found = lines(check(package, **request))
        assert found[0] == f"{WEIGHTS.format(0)}: header of rank 0 says rank; expected 0; found 1"
        assert f"{WEIGHTS.format(0)}: header of rank 0 says tp_rank; expected 0; found 1" in found


def test_a_rank_twice_is_refused_though_it_is_signed(package: Path, keys, check) -> None:
    shutil.rmtree(package / "weights/tp2/rank-1")
    shutil.copytree(package / "weights/tp2/rank-0", package / "weights/tp2/rank-1")
    sign_anew(package, keys[0])
    assert lines(check(package))[0].startswith(f"{WEIGHTS.format(1)}: header of rank 1 says rank; ")


def test_another_tp_is_refused(original: Path, check) -> None:
    assert check(original, tp=2).verified
    (line,) = lines(check(original, tp=4))
    assert line == "manifest.json: cut for another tensor-parallel size; expected TP 4; found TP 2"


def test_a_rank_beyond_the_topology_is_an_option_that_cannot_be_used(original: Path, check) -> None:
    with pytest.raises(UnitError) as refusal:
        check(original, ranks=(1, 2, 7))
    assert str(refusal.value) == "--rank, --ranks: no such rank in this topology; expected 0 to 1; found 2, 7"


def test_a_rank_of_the_topology_that_the_package_has_not_got_is_refused(tmp_path: Path, keys, check) -> None:
    package = make_package(tmp_path / "package", keys[0], SMALL, "--tp", 2, "--ranks", 1)
    assert lines(check(package, ranks=(0,))) == [
        "manifest.json: no such rank in this package; expected one of 1; found 0"
    ]
    found = check(package)
    assert found.verified
    assert not found.in_part


def test_a_manifest_of_another_topology_is_refused_though_it_is_signed(package: Path, keys, check) -> None:
    def change(manifest: Manifest) -> Manifest:
        return replace(manifest, topology=Parallel(tp=4))

    sign_anew(package, keys[0], change)
    expected = "expected weights/tp4/rank-0"
    assert f"{WEIGHTS.format(0)}: not where files of rank 0 lie; {expected}" in lines(check(package))


def test_counts_of_the_manifest_are_those_of_the_headers(package: Path, keys, check) -> None:
    def change(manifest: Manifest) -> Manifest:
        files = [
            replace(file, tensors=file.tensors + 1) if file.rank == 1 and file.tensors else file
            for file in manifest.files
        ]
        return replace(manifest, files=tuple(files))

    sign_anew(package, keys[0], change)
    (line,) = lines(check(package, fast=True))
    assert line.startswith(f"{WEIGHTS.format(1)}: header and manifest; expected ")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


DOCUMENT_LIES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "tp of the plan": ("plan.json", lambda plan: plan["topology"].update(tp=4), "plan of another topology"),
    "plan of less": ("plan.json", lambda plan: plan["ranks"][1].update(weights_bytes=7), "weights_bytes of rank 1"),
    "plan without a rank": ("plan.json", lambda plan: plan["ranks"].pop(), "weights_bytes of rank 1"),
    "plan of another checkpoint": ("plan.json", lambda plan: plan["checkpoint"].update(digest="0"), "plan of another checkpoint"),
    "plan of another engine": ("plan.json", lambda plan: plan.update(engine="vllm"), "plan of another engine"),
    "no plan": ("plan.json", lambda plan: plan.update(schema="x"), "not a plan"),
    "tp of the provenance": ("provenance.json", lambda found: found["options"]["topology"].update(tp=4), "topology is not that of the manifest"),
    "hash of the provenance": ("provenance.json", lambda found: found["options"].update(hash="sha256"), "hash is not that of the manifest"),
    "ranks of the provenance": ("provenance.json", lambda found: found["options"].update(ranks=[0]), "ranks is not that of the manifest"),
    "no provenance": ("provenance.json", lambda found: found.pop("source"), "not a provenance"),
    "index of another file": (INDEX.format(1), lambda index: index["weight_map"].update({"lm_head.weight": "other.safetensors"}), "other.safetensors"),
    "index without a tensor": (INDEX.format(0), lambda index: index["weight_map"].pop("lm_head.weight"), "lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "change", "expected"), DOCUMENT_LIES.values(), ids=DOCUMENT_LIES)
def test_documents_that_do_not_agree_are_refused_though_they_are_signed(
    path: str, change: Callable[[dict[str, Any]], object], expected: str, package: Path, keys, check
) -> None:
    edit_json(package / path, change)
    sign_anew(package, keys[0])
    found = lines(check(package))
    assert any(expected in line for line in found), found
    assert all(line.startswith(("plan.json: ", path)) for line in found)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def change_cut(header: dict[str, Any], change: Callable[[list[Any]], object]) -> None:
    """Change what the metadata says of the first tensor that is cut along rows."""
    slices = json.loads(header["__metadata__"]["slices"])
    change(next(cut for cut in slices if cut and cut[0] == 0))
    header["__metadata__"]["slices"] = json.dumps(slices)


def shifted(cut: list[Any]) -> None:
    for bounds in cut[1]:
        bounds[:] = [bounds[0] - 1, bounds[1] - 1]


HEADER_LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rank": (lambda header: header["__metadata__"].update(rank="0"), "header of rank 1 says rank; expected 1; found 0"),
    "no rank": (lambda header: header["__metadata__"].pop("rank"), "header of rank 1 says rank; expected 1; found nothing"),
    "tp": (lambda header: header["__metadata__"].update(tp_size="4"), "header of rank 1 says tp_size; expected 2; found 4"),
    "ep": (lambda header: header["__metadata__"].update(ep_size="2"), "header of rank 1 says ep_size"),
    "stage": (lambda header: header["__metadata__"].update(pp_rank="1"), "header of rank 1 says pp_rank"),
    "format": (lambda header: header["__metadata__"].update(tonnage_format="x"), "header of rank 1 says tonnage_format"),
    "no slices": (lambda header: header["__metadata__"].pop("slices"), "whole on one rank, and not of the shape it is cut from"),
    "a hole": (lambda header: change_cut(header, shifted), "no rank holds index"),
    "another whole": (lambda header: change_cut(header, lambda cut: cut[2].__setitem__(0, cut[2][0] + 1)), "not cut along one axis of one shape"),
    "slices that are none": (lambda header: header["__metadata__"].update(slices="[1]x"), "metadata slices"),
    "slices of other tensors": (lambda header: header["__metadata__"].update(slices="[0]"), "metadata slices"),
    "a dtype": (lambda header: header["lm_head.weight"].update(dtype="F16"), "not of one dtype on all ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), HEADER_LIES.values(), ids=HEADER_LIES)
def test_headers_that_do_not_agree_are_refused_though_they_are_signed(
    change: Callable[[dict[str, Any]], object], expected: str, package: Path, keys, check
) -> None:
    edit_header(package / WEIGHTS.format(1), change)
    sign_anew(package, keys[0])
    found = lines(check(package, fast=True))
    assert any(expected in line for line in found), found


def test_ranks_without_the_same_tensors_are_refused_though_they_are_signed(package: Path, keys, check) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["model.norm.bias"] = header.pop("model.norm.weight")

    edit_header(package / WEIGHTS.format(1), rename)
    edit_json(package / INDEX.format(1), lambda index: rename_in(index["weight_map"]))
    edit_json(package / "plan.json", lambda plan: plan.update(engine="vllm"))
    edit_json(package / "provenance.json", lambda found: found["options"].update(engine="vllm"))
    sign_anew(package, keys[0])
    found = lines(check(package))
    assert [line.partition("; found")[0] for line in found] == [
        "weights/tp2/rank-0..1/model-00001-of-00001.safetensors: model.norm.weight: held by 1 of 2 ranks",
        "weights/tp2/rank-0..1/model-00001-of-00001.safetensors: model.norm.bias: held by 1 of 2 ranks",
    ]


def rename_in(names: dict[str, Any]) -> None:
    names["model.norm.bias"] = names.pop("model.norm.weight")


# --- a container ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def container(home: Path, keys: tuple[Path, Path]) -> Path:
    """A package whose experts are an exl3-v1 container; not to be changed, or changed back."""
    config = Path(__file__).parent / "data/configs/Kimi-K3.1-Pro.json"
    return make_package(home / "container", keys[0], json.loads(config.read_bytes()), "--tp", 2, experts="exl3-v1")


def test_a_container_is_verified_and_flips_in_its_documents_are_found(container: Path, check) -> None:
    assert check(container).verified
    chance = random.Random(1)
    for name in ("tonnage-slots.json", "exl3-layer-00001.safetensors"):
        path = container / "weights/tp2/rank-1" / name
        for _ in range(5):
            with flipped(path, chance.randrange(path.stat().st_size), chance.randrange(8)):
                (line,) = lines(check(container))
            assert line.startswith(f"weights/tp2/rank-1/{name}: contents are not those signed (rank 1); ")


SLOT_LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rank": (lambda slots: slots.update(rank=0), "slots are not as in tonnage-slots.json"),
    "slots": (lambda slots: slots["layers"]["1"].update(first_slot=0), "slots are not as in tonnage-slots.json"),
    "bytes": (lambda slots: slots["layers"]["1"].update(payload_bytes=1), "payload bytes are not as in tonnage-slots.json"),
    "a layer less": (lambda slots: slots["layers"].pop("1"), "does not list a layer file"),
    "a layer more": (lambda slots: slots["layers"].update({"9": {**slots["layers"]["1"], "file": "x"}}), "lists a layer file that is not here"),
    "none": (lambda slots: slots.update(schema="x"), "not a document of slots"),
}  # fmt: skip


def test_slots_that_do_not_agree_are_refused_though_they_are_signed(container: Path, keys, check) -> None:
    path = container / "weights/tp2/rank-1/tonnage-slots.json"
    kept = {name: (container / name).read_bytes() for name in ("manifest.json", "model.sig")}
    before = path.read_bytes()
    try:
        for change, expected in SLOT_LIES.values():
            edit_json(path, change)
            sign_anew(container, keys[0], only="slots.json")
            assert any(expected in line for line in lines(check(container, fast=True)))
            path.write_bytes(before)
    finally:
        for name, raw in kept.items():
            (container / name).write_bytes(raw)


# --- the stock command, the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["original", "by_sha256"])
def test_a_package_signed_by_the_stock_command_is_verified(which: str, request, tmp_path: Path, keys, check) -> None:
    """By SHA-256, in an order of its own; what it ignores is ignored, and no more."""
    source: Path = request.getfixturevalue(which)
    check(source).check()
    package = shutil.copytree(source, tmp_path / "package")
    (package / "model.sig").unlink()
    words = ["sign", "key", package, "--signature", package / "model.sig", "--private_key", keys[0]]
    stock = Path(sys.executable).with_name("model_signing")
    done = subprocess.run([stock, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(package).check()
    with flipped(package / "config.json", 3, 1):
        assert len(lines(check(package))) == 1
    (package / ".gitattributes").write_bytes(b"")
    check(package).check()
    (package / ".gitmodules").write_bytes(b"")
    assert lines(check(package)) == ["1 file not of this package: .gitmodules"]


def test_a_package_signed_by_the_stock_library_with_blake3_is_verified(package: Path, keys, check) -> None:
    from model_signing import hashing, signing

    (package / "model.sig").unlink()
    config = signing.Config().use_elliptic_key_signer(private_key=keys[0])
    config.set_hashing_config(hashing.Config().use_file_serialization(hashing_algorithm="blake3"))
    config.sign(package, package / "model.sig")
    found = check(package)
    found.check()
    assert found.signed.hash == "blake3"
    flip(package / "config.json", 3, 1)
    assert len(lines(check(package))) == 1


def test_a_listed_sha256_that_is_not_the_signed_one_is_refused(package: Path, keys, check) -> None:
    """Our own verification does not take it; a stock one would be told otherwise."""

    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.files
        return replace(manifest, files=(replace(first, sha256="0" * 64), *others))

    path = sign_anew(package, keys[0], change).files[0].path
    signed = sha256((package / path).read_bytes()).hexdigest()

    def state(statement: dict[str, Any]) -> None:
        (resource,) = (one for one in statement["predicate"]["resources"] if one["name"] == path)
        resource["digest"] = signed

    sign_statement(package, keys[0], state)
    assert lines(check(package)) == [
        f"manifest.json: not the signed digest of {path}; expected {signed}; found {'0' * 64}"
    ]


def test_the_command_says_yes_with_a_table(tonnage: Tonnage, original: Path, keys) -> None:
    done = tonnage("verify", original, "--key", keys[1])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    table, (*_, last) = done.stdout.splitlines()[:4], done.stdout.splitlines()
    nbytes = {path: (original / path).stat().st_size for path in FILES}
    everything, own = sum(nbytes.values()), nbytes["model.sig"]
    assert table[0].split("  ")[-1] == "bytes of all files"
    assert [row.split()[0] for row in table[1:]] == ["0", "1", "shared"]
    assert sum(int(row.split()[-1].replace(",", "")) for row in table[1:]) == everything
    assert last.startswith(f"llama-tp2-20260131: verified: 9 files, {everything:,} bytes (")
    assert f"): {everything - own:,} hashed (blake3), documents included, {own:,} of model.sig, in " in last
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_what_was_verified_in_part_is_called_so(original: Path, keys) -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(app, ["verify", str(original), "--key", str(keys[1]), *words])
        assert done.exit_code == 0
        return done.stdout

    weights = sum((original / WEIGHTS.format(rank)).stat().st_size for rank in (0, 1))
    assert f"{weights:,} of weight files whose headers alone were read" in said("--fast").splitlines()[-1]
    for words, fast in ((["--fast"], True), (["--rank", "1"], False), (["--rank", "0", "--rank", "1"], False)):
        assert ": verified in part: " in said(*words).splitlines()[-1]
        document = json.loads(said(*words, "--json"))
        assert (document["verified"], document["mode"], document["fast"]) == (True, "in part", fast)


def test_the_command_names_the_subject_of_the_certificate(certified: Certified, package: Path, tmp_path: Path) -> None:
    certified().check()
    words = ["verify", str(package), "--certificate-chain", str(tmp_path / "root.pem")]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(done.stdout)["signer"] == {"method": "certificate", "identity": "CN=signer"}
    assert "signed: certificate, CN=signer" in CliRunner().invoke(app, words).stdout.splitlines()


def test_the_command_says_no_with_4_and_prints_its_document_all_the_same(tonnage: Tonnage, package: Path, keys) -> None:
    flip(package / WEIGHTS.format(1), 1000, 0)
    done = tonnage("verify", package, "--key", keys[1], "--json")
    assert done.returncode == 4
    document = json.loads(done.stdout)
    assert document["schema"] == "tonnage.verify/1"
    assert (document["verified"], document["mode"], document["fast"]) == (False, "full", False)
    manifest = parse_manifest((package / "manifest.json").read_bytes())
    assert document["ranks"] == [
        {
            "rank": rank,
            "files": 2,
            "tensors": sum(file.tensors for file in manifest.by_rank()[rank]),
            "payload_bytes": sum(file.payload_bytes for file in manifest.by_rank()[rank]),
            "bytes": sum((package / form.format(rank)).stat().st_size for form in (WEIGHTS, INDEX)),
        }
        for rank in (0, 1)
    ]
    assert document["bytes"] == document["hashed_bytes"] + document["signature_bytes"]
    (problem,) = document["problems"]
    assert problem["where"] == WEIGHTS.format(1)
    assert problem["what"] == "contents are not those signed (rank 1)"
    assert problem["expected"] != problem["found"]
    assert done.stderr.startswith(f"tonnage: {WEIGHTS.format(1)}: ")
    assert tonnage("verify", package, "--key", keys[1]).stdout == ""


def test_what_cannot_be_used_is_2(
    original: Path, keys, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    for words in (
        (original,),
        (original, "--key", keys[0]),
        (original, "--key", tmp_path / "none"),
        (tmp_path / "none", "--key", keys[1]),
        (original, "--key", keys[1], "--identity", "a@b.c"),
        (original, "--key", keys[1], "--rank", "2"),
        (original, "--identity", "a@b.c"),
    ):
        monkeypatch.setattr(sys, "argv", ["tonnage", "verify", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2, words
        assert len(capsys.readouterr().err.splitlines()) == 1
    signal.signal(signal.SIGPIPE, before)


def test_refusals_that_are_the_users_own(original: Path, keys, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        verify_package(original, PublicKey(path=keys[0]))
    with pytest.raises(CheckpointError):
        verify_package(tmp_path / "none", PublicKey(path=keys[1]))
    with pytest.raises(CheckpointError):
        verify_package(original / "config.json", PublicKey(path=keys[1]))


def test_a_verification_without_problems_is_verified() -> None:
    request = VerifyRequest()
    assert Verification(request=request).verified
    assert not Verification(request=request, problems=(Problem(where="a", what="b"),)).verified
