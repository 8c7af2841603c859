"""``manifest.json``: canonical bytes, and every lie in one that was read."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import TonnageError
from tonnage.export.manifest import (
    Manifest,
    PackagedFile,
    PackageError,
    Parallel,
    is_package_path,
    manifest_bytes,
    parse_manifest,
)

DIGEST = "0123456789abcdef" * 4
SHA256 = "fedcba9876543210" * 4
SMALL = Manifest(
    name="small-tp2-20261130",
    tonnage_version="1.2.3",
    hash="blake3",
    layout="tp",
    topology=Parallel(tp=2),
    ranks=(0, 1),
    files=(
        PackagedFile(path="config.json", nbytes=7, digest=DIGEST, sha256=SHA256),
        PackagedFile(
            path="weights/tp2/rank-0/a.safetensors",
            nbytes=100,
            digest=DIGEST,
            sha256=SHA256,
            rank=0,
            tensors=2,
            payload_bytes=60,
        ),
        PackagedFile(path="weights/tp2/rank-0/b.json", nbytes=5, digest=DIGEST, sha256=SHA256, rank=0),
        PackagedFile(
            path="weights/tp2/rank-1/a.safetensors",
            nbytes=90,
            digest=DIGEST,
            sha256=SHA256,
            rank=1,
            tensors=1,
            payload_bytes=50,
        ),
    ),
)
WORKED = (
    b'{"files":['
    b'{"digest":"%(d)s","nbytes":7,"path":"config.json","payload_bytes":0,"rank":null,"sha256":"%(s)s","tensors":0},'
    b'{"digest":"%(d)s","nbytes":100,"path":"weights/tp2/rank-0/a.safetensors","payload_bytes":60,"rank":0,"sha256":"%(s)s","tensors":2},'
    b'{"digest":"%(d)s","nbytes":5,"path":"weights/tp2/rank-0/b.json","payload_bytes":0,"rank":0,"sha256":"%(s)s","tensors":0},'
    b'{"digest":"%(d)s","nbytes":90,"path":"weights/tp2/rank-1/a.safetensors","payload_bytes":50,"rank":1,"sha256":"%(s)s","tensors":1}],'
    b'"hash":"blake3","layout":"tp","name":"small-tp2-20261130",'
    b'"ranks":[{"file_bytes":105,"payload_bytes":60,"rank":0,"tensors":2},'
    b'{"file_bytes":90,"payload_bytes":50,"rank":1,"tensors":1}],'
    b'"schema":"tonnage.manifest/1","tonnage_version":"1.2.3","topology":{"ep":1,"pp":1,"tp":2}}'
) % {b"d": DIGEST.encode(), b"s": SHA256.encode()}

paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(is_package_path)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
files = st.builds(
    PackagedFile,
    path=paths,
    nbytes=st.integers(0, 2**53 - 1),
    digest=digests,
    sha256=digests,
    rank=st.none() | st.integers(0, 2),
    tensors=st.integers(0, 2**40),
)
manifests = st.builds(
    Manifest,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    tonnage_version=st.text(max_size=8),
    hash=st.just("blake3"),
    layout=st.sampled_from(["tp", "hf"]),
    topology=st.builds(Parallel, tp=st.integers(1, 8), pp=st.integers(3, 5)),
    ranks=st.just((0, 1, 2)),
    files=st.lists(files, max_size=4, unique_by=lambda file: file.path).map(
        lambda found: tuple(sorted(found, key=lambda file: file.path))
    ),
)
manifests |= manifests.map(
    lambda found: replace(found, hash="sha256", files=tuple(replace(file, sha256=None) for file in found.files))
)


def test_bytes_are_those_worked_by_hand() -> None:
    assert manifest_bytes(SMALL) == WORKED
    assert parse_manifest(WORKED) == SMALL


def test_page_shows_the_same_manifest() -> None:
    page = (Path(__file__).parent.parent / "docs" / "package-format.md").read_text()
    shown = re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0]
    assert rfc8785.dumps(json.loads(shown)) == WORKED


@given(manifests)
def test_bytes_are_canonical_and_read_back(manifest: Manifest) -> None:
    raw = manifest_bytes(manifest)
    total = max((sum(file.nbytes for file in manifest.by_rank()[rank]) for rank in manifest.ranks), default=0)
    if total < 2**53:  # beyond, no reader of JSON keeps it
        assert raw == rfc8785.dumps(json.loads(raw))
        assert parse_manifest(raw) == manifest
    else:
        with pytest.raises(PackageError):
            parse_manifest(raw)


def test_digests_are_stated_by_one_algorithm_or_two() -> None:
    paths = [file.path for file in SMALL.files]
    assert SMALL.digests("blake3") == dict.fromkeys(paths, DIGEST)
    assert SMALL.digests("sha256") == dict.fromkeys(paths, SHA256)
    alone = replace(SMALL, hash="sha256", files=tuple(replace(file, sha256=None) for file in SMALL.files))
    assert alone.digests("sha256") == dict.fromkeys(paths, DIGEST)
    assert alone.digests("blake3") == {}


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(WORKED)
    change(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def put(*steps: Any) -> Callable[[dict[str, Any]], None]:
    *way, last, value = steps

    def change(document: Any) -> None:
        for step in way:
            document = document[step]
        document[last] = value

    return change


def path(text: str) -> Callable[[dict[str, Any]], None]:
    return put("files", 0, "path", text)


LIES = {
    "name up": (put("name", "../x"), "not the name of a package"),
    "name and a line": (put("name", "x\n"), "not the name of a package"),
    "no name": (put("name", ""), "not the name of a package"),
    "path up": (path("../config.json"), "not a path"),
    "path up inside": (path("weights/../../x"), "not a path"),
    "absolute": (path("/etc/passwd"), "not a path"),
    "this": (path("./config.json"), "not a path"),
    "double slash": (path("a//b"), "not a path"),
    "trailing slash": (path("a/"), "not a path"),
    "empty": (path(""), "not a path"),
    "dot": (path("."), "not a path"),
    "backslash": (path("a\\b"), "not a path"),
    "zero byte": (path("a\0b"), "not a path"),
    "new line": (path("a\nb"), "not a path"),
    "right to left": (path("a\u202egpj"), "not a path"),
    "itself": (path("manifest.json"), "not a path"),
    "the signature": (path("model.sig"), "not a path"),
    "twice": (path("weights/tp2/rank-0/a.safetensors"), "not sorted, or one stands twice"),
    "unsorted": (lambda d: d["files"].reverse(), "not sorted, or one stands twice"),
    "short digest": (put("files", 0, "digest", "ab"), "not a manifest"),
    "upper digest": (put("files", 0, "digest", DIGEST.upper()), "not a manifest"),
    "digest and a line": (put("files", 0, "digest", DIGEST + "\n"), "not a manifest"),
    "short SHA-256": (put("files", 0, "sha256", "ab"), "not a manifest"),
    "no SHA-256": (put("files", 0, "sha256", None), "SHA-256 of config.json beside its blake3; expected one"),
    "SHA-256 twice": (put("hash", "sha256"), "SHA-256 of config.json beside its sha256; expected none"),
    "negative": (put("files", 0, "nbytes", -1), "not a manifest"),
    "huge": (put("files", 0, "nbytes", 2**53), "not a manifest"),
    "very huge": (put("files", 0, "nbytes", 10**400), "not a manifest"),
    "fraction": (put("files", 0, "nbytes", 7.5), "not a manifest"),
    "whole fraction": (put("files", 0, "nbytes", 7.0), "not a manifest"),
    "truth": (put("files", 0, "nbytes", True), "not a manifest"),
    "text": (put("files", 0, "nbytes", "7"), "not a manifest"),
    "payload beyond size": (put("files", 1, "payload_bytes", 101), "holds more than its size"),
    "rank that is not here": (put("files", 1, "rank", 5), "of a rank that is not here"),
    "rank beyond topology": (put("topology", "tp", 1), "beyond the topology"),
    "rank twice": (put("ranks", 1, "rank", 0), "ranks are not sorted"),
    "wrong total": (put("ranks", 0, "payload_bytes", 61), "not the sums"),
    "unknown member": (put("more", 1), "not written canonically"),
    "unknown member of a file": (put("files", 0, "mode", 493), "not written canonically"),
    "no files": (lambda d: d.pop("files"), "not a manifest"),
    "other schema": (put("schema", "tonnage.manifest/2"), "not a manifest"),
    "other hash": (put("hash", "md5"), "not a manifest"),
    "other layout": (put("layout", "pp"), "not a manifest"),
    "too many ranks": (put("topology", "tp", 1 << 20), "not a manifest"),
    "no tp": (put("topology", "tp", 0), "not a manifest"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), LIES.values(), ids=LIES)
def test_lie_is_refused(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(PackageError, match=said) as caught:
        parse_manifest(changed(change))
    assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_many_ranks_and_files_are_read_in_time_that_grows_with_them() -> None:
    sizes = Parallel(tp=100, pp=100)
    listed = (
        PackagedFile(
            path=f"weights/{rank:05}", nbytes=9, digest=DIGEST, sha256=SHA256, rank=rank, payload_bytes=rank % 9
        )
        for rank in range(sizes.world_size)
    )
    raw = manifest_bytes(replace(SMALL, topology=sizes, ranks=tuple(range(sizes.world_size)), files=tuple(listed)))
    begin = time.process_time()
    found = parse_manifest(raw)
    assert [file.rank for file in found.by_rank()[777]] == [777]
    assert time.process_time() - begin < 20  # rank by rank over all files it would be minutes


def test_a_manifest_of_more_than_any_package_is_refused_before_it_is_parsed() -> None:
    begin, end = WORKED[:-1] + b',"z":', b"}"
    for more in (b"[" + b"0," * 1_000_001 + b"0]", b"[" + b"[]," * 100_001 + b"0]", b'"' + b"x" * (64 << 20) + b'"'):
        with pytest.raises(PackageError, match="manifest too large; expected at most 67108864 bytes, 100000 files"):
            parse_manifest(begin + more + end)


def test_a_manifest_of_lies_names_a_few_dozen_of_them() -> None:
    files = tuple(replace(SMALL.files[0], path=f"a/../{number:04}") for number in range(1000))
    with pytest.raises(PackageError) as caught:
        parse_manifest(manifest_bytes(replace(SMALL, files=files)))
    assert len(caught.value.problems) == 40


NO_MANIFESTS = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b"\xff",
    "an array": b"[]",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep in a member": WORKED[:-1] + b',"z":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "blanks": WORKED.replace(b",", b", "),
    "end of line": WORKED + b"\n",
    "two": WORKED + WORKED,
    "key twice": WORKED.replace(b'"layout":"tp"', b'"layout":"hf","layout":"tp"'),
    "escaped": WORKED.replace(b"config.json", rb"config\u002ejson"),
    "half a surrogate": WORKED.replace(b"config.json", rb"\ud800"),
}


@pytest.mark.parametrize("raw", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_other_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(PackageError):
        parse_manifest(raw)


@given(st.binary(max_size=200) | st.integers(0, len(WORKED) - 1).map(lambda at: WORKED[:at] + WORKED[at + 1 :]))
def test_bytes_are_refused_or_are_those_of_what_was_read(raw: bytes) -> None:
    try:
        found = parse_manifest(raw)
    except TonnageError:
        return
    assert manifest_bytes(found) == raw
