"""Reading and hashing of a package's files: the digests are those of the plain libraries, however the work is shared."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from packages import HASHES
from samples import PATIENCE
from tonnage.export import hashing
from tonnage.export.hashing import Content, Keep, ReadRefusedError, Target, digest_of, read_targets, read_whole
from tonnage.export.walk import opened

WINDOW, LARGE = 1 << 12, 1 << 14
SIZES = (
    0,
    1,
    7,
    8,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    LARGE - 1,
    LARGE,
    LARGE + 1,
    2 * LARGE,
    5 * LARGE + 3,
    9 * LARGE + WINDOW,
)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(hashing, "LARGE_WINDOW_BYTES", LARGE)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read(root: int, targets: list[Target], cores: int | None = None) -> dict[str, Content]:
    return {content.path: content for content in read_targets(root, targets, lambda _nbytes, _files: None, cores=cores)}


@pytest.mark.parametrize("cores", [1, 2, 3, 16])
@pytest.mark.parametrize("hashes", [("blake3",), ("sha256",), ("blake3", "sha256")])
def test_digests_are_those_of_the_libraries(cores: int, hashes: tuple, tmp_path: Path, root: int) -> None:
    contents = {f"f{nbytes}": random.Random(nbytes).randbytes(nbytes) for nbytes in SIZES}
    for name, raw in contents.items():
        (tmp_path / name).write_bytes(raw)
    targets = [Target(path=name, nbytes=len(raw), keep="nothing", hashes=hashes) for name, raw in contents.items()]
    found = read(root, targets, cores)
    assert {name: content.digests for name, content in found.items()} == {
        name: tuple(HASHES[algorithm](raw).hexdigest() for algorithm in hashes) for name, raw in contents.items()
    }


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("nbytes", [11 * LARGE, 11 * LARGE + 77])
def test_one_huge_file_is_hashed_by_all_cores(cores: int, nbytes: int, tmp_path: Path, root: int) -> None:
    raw = random.Random(nbytes).randbytes(nbytes)
    (tmp_path / "huge").write_bytes(raw)
    for name, digest in HASHES.items():
        (content,) = read(root, [Target(path="huge", nbytes=nbytes, keep="nothing", hashes=(name,))], cores).values()  # type: ignore[arg-type]
        assert content.digests == (digest(raw).hexdigest(),)


@pytest.mark.parametrize("length", [2, 100, WINDOW - 8, WINDOW, 3 * LARGE + 5])
@pytest.mark.parametrize("cores", [1, 4])
def test_a_header_is_kept_and_hashed_with_the_rest(length: int, cores: int, tmp_path: Path, root: int) -> None:
    raw = length.to_bytes(8, "little") + random.Random(length).randbytes(length + 2 * LARGE)
    (tmp_path / "a").write_bytes(raw)
    for hashes in ((), ("blake3",), ("sha256",)):
        content = read(root, [Target(path="a", nbytes=len(raw), keep="header", hashes=hashes)], cores)["a"]  # type: ignore[arg-type]
        assert content.kept == raw[: 8 + length]
        assert content.digests == tuple(HASHES[name](raw).hexdigest() for name in hashes)


@pytest.mark.parametrize("keep", ["header", "all"])
def test_what_is_no_header_is_hashed_all_the_same(keep: Keep, tmp_path: Path, root: int) -> None:
    for raw in (b"", b"1234", b"\xff" * 20):
        (tmp_path / "a").write_bytes(raw)
        content = read(root, [Target(path="a", nbytes=len(raw), keep=keep, hashes=("blake3",))])["a"]
        assert content.digests == (blake3(raw).hexdigest(),)
        assert content.kept == (raw if keep == "all" else raw[:8])


def test_nothing_but_the_header_is_read_without_a_hash(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(LARGE))
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    read(root, [Target(path="a", nbytes=10 + LARGE, keep="header", hashes=())])
    assert counts == [8, 2]


def test_files_are_read_at_the_same_time(tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of equal size by two cores: each waits until both have begun."""
    both = threading.Barrier(2, timeout=PATIENCE)
    preadv = os.preadv
    for name in "ab":
        (tmp_path / name).write_bytes(b"12345678")

    def meeting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        both.wait()
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", meeting)
    found = read(root, [Target(path=name, nbytes=8, keep="nothing", hashes=("sha256",)) for name in "ab"], cores=2)
    assert {content.digests for content in found.values()} == {(HASHES["sha256"](b"12345678").hexdigest(),)}


def test_progress_ends_with_everything(tmp_path: Path, root: int) -> None:
    told: list[tuple[int, int]] = []
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(LARGE + 1))
    targets = [Target(path=name, nbytes=LARGE + 1, keep="nothing", hashes=("blake3",)) for name in "abc"]
    list(read_targets(root, targets, lambda nbytes, files: told.append((nbytes, files))))
    assert told[-1] == (3 * LARGE + 3, 3)
    assert told == sorted(told)


def test_leaving_early_ends_the_threads(tmp_path: Path, root: int) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes(LARGE))
    targets = [Target(path=str(number), nbytes=LARGE, keep="nothing", hashes=("blake3",)) for number in range(20)]
    before = threading.active_count()
    contents = read_targets(root, targets, lambda _nbytes, _files: None, cores=2)
    next(contents)
    contents.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_memory_does_not_grow_with_the_size_of_a_file(tmp_path: Path, root: int) -> None:
    nbytes = 1 << 40
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", nbytes)
    target = Target(path="sparse", nbytes=nbytes, keep="nothing", hashes=("blake3",))

    def leave(done: int, _files: int) -> None:
        if done:
            raise InterruptedError

    tracemalloc.start()
    try:
        with pytest.raises(InterruptedError):
            list(read_targets(root, [target], leave, cores=4))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_another_size_is_refused_before_anything_is_read(tmp_path: Path, root: int) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    content = read(root, [Target(path="a", nbytes=9, keep="nothing", hashes=("blake3",))])["a"]
    assert [str(problem) for problem in content.problems] == ["a: size; expected 9 bytes; found 10 bytes"]
    assert content.digests == ()


def test_no_part_of_a_path_may_be_a_link(tmp_path: Path, root: int) -> None:
    (tmp_path / "real/inner").mkdir(parents=True)
    (tmp_path / "real/inner/a").write_bytes(b"1")
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "real/b").symlink_to("inner/a")
    with opened(root, "real/inner/a") as (descriptor, nbytes):
        assert (os.read(descriptor, 9), nbytes) == (b"1", 1)
    for path in ("linked/inner/a", "real/b", "real/inner", "real/none", "none/a"):
        assert read(root, [Target(path=path, nbytes=1, keep="nothing", hashes=("blake3",))])[path].problems
        with pytest.raises(ReadRefusedError):
            read_whole(root, path, limit_bytes=10)


def test_a_small_file_is_read_whole_up_to_its_limit(tmp_path: Path, root: int) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_whole(root, "a", limit_bytes=5) == b"12345"
    with pytest.raises(ReadRefusedError, match="a: file too large; expected at most 4 bytes; found 5 bytes"):
        read_whole(root, "a", limit_bytes=4)
    with pytest.raises(ReadRefusedError, match="b: file is missing"):
        read_whole(root, "b", limit_bytes=4)


def test_digest_of_bytes() -> None:
    """The published digests of nothing and of ``abc``."""
    assert digest_of(b"", "blake3") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest_of(b"abc", "sha256") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
