"""What vLLM's own ``sharded_state`` loader makes of directories, against its default loading of the checkpoints.

Run: python sharded_contents.py OUTPUT JOB...
A job is a JSON object: ``sharded``, ``checkpoint``, ``topology``. OUTPUT gets a JSON list: of every job and rank the number
of parameters and the names of those that differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rank_contents import differences, engine_config, load_rank


def main(output: str, *jobs: str) -> None:
    """Do the jobs."""
    Path(output).write_text(json.dumps([_answer(json.loads(job)) for job in jobs]))


def _answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    topology = job["topology"]
    sharded = engine_config(job["sharded"], load_format="sharded_state", **topology)
    default = engine_config(job["checkpoint"], **topology)
    answers = []
    for rank in range(topology["tp"]):
        found, expected = load_rank(sharded, rank), load_rank(default, rank)
        answers.append({"parameters": len(expected.tensors), "different": differences(found, expected)})
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
