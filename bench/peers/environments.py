"""Environments of peers, what is installed in them, and the machine all of it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = """
import sys
from importlib.metadata import version

print(*map(version, sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment, made when it is not there.

    Attributes:
        directory: Where it is.
        requirements: What is installed in it, each at one version.
    """

    directory: Path
    requirements: Path

    def python(self) -> Path:
        """Return its interpreter; everything is installed anew where requirements changed."""
        python, stamp = self.directory / "bin" / "python", self.directory / ".installed"
        if not stamp.exists() or stamp.read_text() != self.requirements.read_text():
            venv.create(self.directory, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", self.requirements], check=True)
            stamp.write_text(self.requirements.read_text())
        return python


PLANNERS = Environment(directory=ROOT / ".venv-peers", requirements=Path(__file__).with_name("requirements.txt"))
CONVERTERS = Environment(
    directory=ROOT / ".venv-peers-formats", requirements=Path(__file__).with_name("requirements-formats.txt")
)


def versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the installed version of every package."""
    asked = list(names)
    done = subprocess.run([python, "-c", VERSIONS, *asked], check=True, capture_output=True, text=True)
    return dict(zip(asked, done.stdout.split(), strict=True))


def commit() -> str:
    """Return the commit that is measured, and whether files differ from it."""
    done = subprocess.run(
        ["/usr/bin/git", "describe", "--always", "--dirty"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return done.stdout.strip() or "no repository"


def machine() -> str:
    """Return one line about the machine, its load when this began, and the date."""
    cpus = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words = (
        f"{cpus} CPUs of {_processor()}",
        f"{gib:.0f} GiB",
        f"Linux {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.1f} at the start",
        f"{datetime.now(tz=UTC):%Y-%m-%d}",
    )
    return ", ".join(words)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
