"""Shared fixtures: the command as users run it, and the committed configs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def configs() -> Path:
    """The directory of public model configs."""
    return ROOT / "tests" / "data" / "configs"


@pytest.fixture(scope="session")
def tonnage() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed command in a process of its own."""
    command = Path(sys.executable).with_name("tonnage")

    def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )

    return run
