"""Settings of a heavy run, which stand before the first import of vLLM, that reads them once; and what it prints."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = tempfile.TemporaryDirectory()  # vLLM notes there what it has found out about its models
SETTINGS = {
    "VLLM_CACHE_ROOT": CACHE.name,
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: an import takes 15 s
    "VLLM_KIMI_K3_GEMM_AR": "0",  # this and the next import a compiler for GPUs
    "VLLM_ENABLE_GEMM_RS": "0",
    # Threads that wait for each other on a busy machine take ten times as long as one, and those of engines do not sleep.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
os.environ.update(SETTINGS)
sys.path[:0] = [str(HERE), str(HERE / "stubs")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that were recorded; what a worker prints is not seen."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "figures":
                terminalreporter.write_line(str(value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that tested nothing: skipped tests are none."""
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    if report is not None and not report.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
