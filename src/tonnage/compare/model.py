"""Opening one side of a comparison: a checkpoint, a package, a prepared directory, or the ranks of another tool."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.api import read_config
from tonnage.compare.pairs import Tensor, tensors_of
from tonnage.compare.subjects import Subject, subject_of
from tonnage.compare.wholes import CompareError, Whole, put_together
from tonnage.errors import Problem, one_line
from tonnage.measure.places import find_places
from tonnage.prepare.reader import open_rank

if TYPE_CHECKING:
    from tonnage.compare.windows import Views
    from tonnage.prepare.reader import RankView, TensorView

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One side, open for reading.

    Attributes:
        name: Of the directory.
        root: The directory.
        ranks: Number of ranks; one where nothing is cut.
        views: Their tensors.
        fields: Of config.json; empty where there is none.
        tensors: By name, parts put together, scales with their codes.
        subject: What it is.
    """

    name: str
    root: Path
    ranks: int
    views: Views
    fields: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    subject: Subject


@contextmanager
def open_model(path: str | Path) -> Iterator[Model]:
    """Open a directory; its files are closed at the end.

    Raises:
        TonnageError: It holds no ranks, not all of them, or a file of it is wrong.
    """
    root = Path(path).resolve()
    where = one_line(root.name or str(root))
    if not root.is_dir():
        expected = "a checkpoint, a package or a prepared directory"
        raise CompareError(Problem(where=one_line(str(path)), what="no such directory", expected=expected))
    places = find_places(root, where=where)
    with ExitStack() as files:
        views = {rank: files.enter_context(open_rank(place, rank)) for rank, place in places.directories.items()}
        fields = read_config(root).fields if os.path.lexists(root / CONFIG) else {}
        tensors = tensors_of(_wholes(views, where))
        yield Model(
            name=where,
            root=root,
            ranks=len(views),
            views=views,
            fields=fields,
            tensors=tensors,
            subject=subject_of(root),
        )


def _wholes(views: Mapping[int, RankView], where: str) -> dict[str, Whole]:
    held: dict[str, dict[int, TensorView]] = {}
    for rank, view in views.items():
        for name, tensor in view.tensors.items():
            held.setdefault(name, {})[rank] = tensor
    return {name: put_together(name, parts, where=where) for name, parts in held.items()}
