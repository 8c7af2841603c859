"""Stands for ``vllm`` in tests of ``tonnage serve``: says what a log of vLLM 0.32.0 on a CPU says, and answers /health.

Run as ``vllm serve MODEL ...`` with a JSON object in FAKE_ENGINE: ``mode`` what it does, ``out`` a file that gets its words,
environment and processes, ``held`` and ``tokens`` what it says that it holds, ``record`` where it is noted, ``sends`` a signal to its parent when it serves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

ENGINE = "(EngineCore pid=7) INFO 11-30 19:07:19 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='{model}', tensor_parallel_size={tp}, pipeline_parallel_size=1"
LOADED = "(Worker{rank} pid=9) INFO 11-30 19:07:26 [loader.py:190] tonnage: {model}/weights: read {held} bytes in 25 tensors, planned {held}, in 0.15 s, verified; the model holds {held}, of these 0 in nothing the files have not"
RESERVED = "(Worker{rank} pid=9) INFO 11-30 19:07:27 [cpu_worker.py:260] Explicitly set (0.01/23.54) GiB for KV cache on node 0."
CACHE = "(EngineCore pid=7) INFO 11-30 19:07:27 [kv_cache_utils.py:2327] CPU KV cache size: {tokens} tokens, Maximum concurrency for 256 tokens per request: 5.50x"
REFUSED = "(Worker pid=9) ValueError: Available memory on node 0 (1.0/23.54 GiB) on kv cache allocation is less than requested memory for kv (2.0 GiB)."
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \u202eevil Model loading took"


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def say(text: str) -> None:
    """Say a line, as an engine does: at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Do as the mode says."""
    told = json.loads(os.environ["FAKE_ENGINE"])
    mode, words = told["mode"], sys.argv[1:]
    flags = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    apart = mode == "scatters"
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"], start_new_session=apart)
    facts = {"words": words, "environment": dict(os.environ), "processes": [os.getpid(), child.pid]}
    with open(told["out"], "w") as stream:  # noqa: PTH123 - no imports that take time
        json.dump(facts, stream)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: end(None if apart else child))
    speak(told, mode, words[1], int(flags.get("--tensor-parallel-size", 1)))
    if mode in ("dies", "refuses"):
        return 7
    if mode == "never":
        tell_parent(told)
        time.sleep(3600)
    server = HTTPServer((flags["--host"], int(flags["--port"])), Health)
    server.handle_request()
    if mode == "dies later":
        return 3
    if mode == "hostile":
        while not os.path.exists(told["record"]):  # noqa: PTH110 - no imports that take time
            time.sleep(0.05)
        say(LOADED.format(rank="", model="request", held=999_999_999_999))
    tell_parent(told)
    while True:
        server.handle_request()


def speak(told: dict[str, Any], mode: str, model: str, tp: int) -> None:
    """Say what the start of a log says."""
    say(" ".join(sys.argv[-6:]))
    say(ENGINE.format(model=model, tp=tp))
    if mode == "hostile":
        say(HOSTILE)
        say("A" * 200_000 + " GiB")
    if mode == "dies":
        sys.stderr.write("Traceback (most recent call last):\n\x1b[31mRuntimeError: no such kernel\x1b[0m\n")
        return
    if mode == "refuses":
        say(REFUSED)
        return
    if mode == "silent":
        return
    for rank in range(tp):
        label = f"_TP{rank}" if tp > 1 else ""
        say(LOADED.format(rank=label, model=model, held=told["held"]))
        say(RESERVED.format(rank=label))
    say(CACHE.format(tokens=f"{told['tokens']:,}"))
    if mode == "floods":
        line = "INFO 127.0.0.1 POST /v1/completions 200 OK\n" * 1000
        for _ in range(200):
            sys.stdout.write(line)


def tell_parent(told: dict[str, Any]) -> None:
    """Send what a user would."""
    sys.stdout.flush()
    if told.get("sends"):
        os.kill(os.getppid(), told["sends"])


def end(child: subprocess.Popen[bytes] | None) -> None:
    """End as an engine does that is asked to, with its worker or without."""
    if child is not None:
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
