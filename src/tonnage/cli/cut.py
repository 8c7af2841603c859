"""What ``plan``, ``fit``, ``flags`` and ``inspect`` do where SOURCE is cut into ranks: as ``serve`` plans it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tonnage.cli.options import note
from tonnage.errors import Problem, UnitError

if TYPE_CHECKING:
    from tonnage.api import Checkpoint
    from tonnage.plan import Plan
    from tonnage.serve.source import Served
    from tonnage.topology import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A package or a prepared directory of one directory per rank, if SOURCE is one.

    Attributes:
        served: As ``serve`` opens it; ``None`` for anything else, which is planned as asked.
    """

    served: Served | None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Its tensors, whole, as its ranks store them."""
        return None if self.served is None else self.served.checkpoint

    def sizes(self, *, tp: int | None, ep: int | None, pp: int | None) -> tuple[int, int, int]:
        """Return the parallel sizes: those it is cut for, else as asked, else 1.

        Raises:
            UnitError: Others are asked for than it is cut for.
        """
        if self.served is None:
            return 1 if tp is None else tp, 1 if ep is None else ep, 1 if pp is None else pp
        own = self.served.sizes(tp=tp, ep=ep, pp=pp)
        return own.tp, own.ep, own.pp

    def engine(self, asked: Engine | None, default: Engine) -> Engine:
        """Return by whose rules it is planned: as asked, else those it is cut by.

        Raises:
            FlagsError: It is cut by other rules than those asked for.
        """
        if self.served is None:
            return asked or default
        if asked is not None:
            self.served.check(asked)
        return asked or cast("Engine", self.served.engine)

    def profile(self, name: str | None, context: int | None) -> tuple[str | None, int | None]:
        """Return what is to be served: as asked, else what it was made for."""
        return (name, context) if self.served is None else made_for(self.served, name, context)

    def check_convert(self, convert: str) -> None:
        """Refuse to plan a conversion of what is written.

        Raises:
            UnitError: One is asked for.
        """
        if self.served is not None and convert != "none":
            what, expected = f"a {self.served.kind} is planned as its ranks store it", "prepare --convert of its source"
            raise UnitError(Problem(where="--convert", what=what, expected=expected, found=convert))

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan of other weights than those on record.

        Raises:
            CheckpointError: Naming the ranks that differ.
        """
        if self.served is not None:
            self.served.check_plan(plan)

    def suggested(self, found: tuple[str, ...]) -> tuple[str, ...]:
        """Return what would fit, with what must be prepared anew for it."""
        return found if self.served is None else self.served.suggested(found)


def open_cut(source: str) -> Cut:
    """Return SOURCE as what is cut into ranks, if it is.

    Raises:
        TonnageError: It is, and something of it is missing or wrong.
    """
    from pathlib import Path

    from tonnage.api import cut_into_ranks
    from tonnage.sources.addresses import is_remote, open_source

    if is_remote(source) or not Path(source).is_dir() or cut_into_ranks(open_source(source)) is None:
        return Cut(served=None)
    from tonnage.serve.source import open_served

    return Cut(served=open_served(source))


def made_for(served: Served, name: str | None, context: int | None) -> tuple[str | None, int | None]:
    """Return what is to be served: as asked, else what the package was made for, which is said."""
    made = served.profile
    if name is None and made.concurrency and made.prefill_chunk_tokens:
        name = f"c{made.concurrency}-p{made.prefill_chunk_tokens}"
        note(f"profile of the package: {name}" + (f", context {made.context_tokens}" if made.context_tokens else ""))
    return name, context or made.context_tokens
