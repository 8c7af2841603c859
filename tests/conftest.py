"""Shared fixtures: the command as users run it, and the committed configs. What the machine is like decides nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from samples import PATIENCE, kept_port, write_key

ROOT = Path(__file__).resolve().parent.parent
# Of the interpreter, terminals, proxies and clients of whoever runs the tests.
FOREIGN = (
    "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE",
    "PYTHONIOENCODING", "PYTHONUNBUFFERED", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY",
    "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HF_TOKEN", "HF_ENDPOINT", "HF_HOME", "CUDA_VISIBLE_DEVICES", "DISPLAY",
    "WAYLAND_DISPLAY", "TONNAGE_OFFLINE",
)  # fmt: skip
PROGRESS = re.compile(r"^[\d.]+ of [\d.]+ \w+, \d+ of \d+ jobs.*\n", re.MULTILINE)
for name in FOREIGN:
    os.environ.pop(name, None)
# A busy machine fails no property: how long an example takes is not looked at.
settings.register_profile("tonnage", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("tonnage"), derandomize=True, database=None)
settings.load_profile("tonnage")


@pytest.fixture(scope="session")
def configs() -> Path:
    """The directory of public model configs."""
    return ROOT / "tests" / "data" / "configs"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private and a public key."""
    return write_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def port() -> Iterator[int]:
    """A port for a server."""
    with kept_port() as kept:
        yield kept


@pytest.fixture(scope="session")
def tonnage() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed command in a process of its own, without the lines it says only where it takes long."""
    command = Path(sys.executable).with_name("tonnage")

    def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [command, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if words[:1] != ("prepare",):  # which always says how far it is
            done.stderr = PROGRESS.sub("", done.stderr)
        return done

    return run


@pytest.fixture
def tonnage_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in this process, to be fast."""
    from tonnage.cli import main

    monkeypatch.setattr("tonnage.cli.signal.signal", lambda *_: None)

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["tonnage", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(words, stopped.value.code or 0, printed.out, printed.err)

    return run
