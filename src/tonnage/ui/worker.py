"""A process that answers questions: read from standard input, answered on standard output, until the input ends.

Planning is in processes because a process can be ended: a question that takes too long takes its worker with it, and
so does a bug, whose traceback goes to standard error and not to who asked.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from tonnage.ui.answers import ANSWERS, answer, answer_by
from tonnage.ui.messages import LENGTH_BYTES, READY, Question
from tonnage.ui.pages import page_answers
from tonnage.ui.settings import Settings
from tonnage.ui.shelf import Shelf

HANDLERS = {**ANSWERS, **page_answers(answer)}
COLLECT_AFTER = 50_000
"""Objects made before the collector looks for cycles: a plan makes thousands and none."""


def main() -> None:
    """Answer questions as the settings of the first argument allow."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its workers
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = settings.memory_bytes if most == resource.RLIM_INFINITY else min(settings.memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes where answers are read
    answers.write(READY)
    answers.flush()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    serve(questions, answers, Shelf(settings))


def serve(questions: BinaryIO, answers: BinaryIO, shelf: Shelf) -> None:
    """Answer questions until their stream ends."""
    decode, encode = msgspec.msgpack.Decoder(Question).decode, msgspec.msgpack.Encoder().encode
    while len(head := questions.read(LENGTH_BYTES)) == LENGTH_BYTES:
        question = decode(questions.read(int.from_bytes(head)))
        content = encode(answer_by(HANDLERS[question.name], shelf, question.body))
        answers.write(len(content).to_bytes(LENGTH_BYTES) + content)
        answers.flush()


if __name__ == "__main__":
    main()
