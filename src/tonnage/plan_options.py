"""The request of a plan from options as they are typed: those of plan, fit and flags, and of a page.

No file is opened here: a draft and a calibration record are read where the options come from.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tonnage.api import Convert, Estimator, PlanRequest
from tonnage.calibrations.io import known_records
from tonnage.errors import Problem, TonnageError, UnitError, raise_if_any
from tonnage.memory.cache_dtypes import engine_kv_dtype
from tonnage.memory.workspace_shape import parse_release
from tonnage.profile import Profile, parse_profile
from tonnage.supply_options import AskedSupply, ask_supply
from tonnage.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.api import Checkpoint
    from tonnage.calibrations.credit_records import CreditRecord
    from tonnage.draft import DraftMethod
    from tonnage.topology import Engine

_GPUS = 8
"""Where nobody says how many there are."""


def plan_request(  # noqa: PLR0913 - one parameter per option
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dcp: int = 1,
    engine: Engine,
    gpu: str | None,
    supply: str | None,
    free: str | None = None,
    utilization: str | None = None,
    reserve: str = "0",
    profile: str | None,
    context: int | None,
    kv_dtype: str | None,
    kv_bytes: str | None = None,
    engine_version: str | None = None,
    eager: bool = False,
    draft: Checkpoint | None = None,
    draft_bytes: str = "0",
    draft_method: DraftMethod | None = None,
    draft_tokens: int | None = None,
    convert: Convert = "none",
    estimator: Estimator = "exact",
    credit_permille: int | None = None,
    credit_record: CreditRecord | None = None,
    device_bytes: int | None = None,
    ranks: int | None = None,
) -> PlanRequest:
    """Return the request; every argument is an option as it was typed, or what it names.

    Raises:
        TonnageError: Options cannot be read, or contradict each other; every problem is named.
    """
    found = _Found()
    with found.kept():
        _check_share(utilization, engine)
    by_record = estimator == "credit" and credit_permille is None and credit_record is None
    asked, served = AskedSupply(), Profile()
    with found.kept():
        asked = ask_supply(gpu=gpu, supply=supply, free=free, utilization=utilization, ranks=ranks or tp * pp)
    with found.kept():
        served = parse_profile(profile, context_tokens=context, kv_dtype=kv_dtype)
        if estimator == "exact":
            _check_whole(served, engine)
    held = {name: found.size(text, f"--{name}") for name, text in (("reserve", reserve), ("draft-bytes", draft_bytes))}
    given = None if kv_bytes is None else found.size(kv_bytes, "--kv-bytes")
    with found.kept():
        _check_release(engine_version)
    with found.kept():
        request = PlanRequest(
            tp=tp,
            ep=ep,
            pp=pp,
            dcp=dcp,
            engine=engine,
            supply=asked.supply,
            gpu=asked.gpu,
            context_held=asked.context_held,
            reserve_bytes=held["reserve"],
            convert=convert,
            profile=served,
            version=engine_version,
            kv_bytes=given,
            eager=eager,
            draft=draft,
            draft_bytes=held["draft-bytes"],
            draft_method=draft_method,
            draft_tokens=draft_tokens,
            estimator=estimator,
            credit_permille=credit_permille,
            credit_record=credit_record,
            credit_records=tuple(found.record for found in known_records()) if by_record else (),
            device_bytes=device_bytes,
        )
        if kv_dtype is not None and not request.serves:
            engine_kv_dtype(kv_dtype, ())  # used by nothing, and yet no word that means nothing
    found.check()
    return request


def _check_whole(served: Profile, engine: str) -> None:
    """Refuse half of what is to be served: nothing of it would be planned, and the verdict be that of weights alone."""
    said = {"--profile": served.concurrency, "--context": served.context_tokens}
    missing = [name for name, value in said.items() if not value]
    if engine == "split" and len(missing) == 1:
        (given,) = said.keys() - missing
        expected = f"{missing[0]} as well, or the engine that serves, --engine vllm"
        raise UnitError(Problem(where=given, what="alone plans no cache with --engine split", expected=expected))


class _Found:
    """What cannot be read of the options, so that all of it is named at once."""

    def __init__(self) -> None:
        self._errors: list[TonnageError] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a refusal for later."""
        try:
            yield
        except TonnageError as error:
            self._errors.append(error)

    def size(self, text: str, where: str) -> int:
        """Return a size; 0 for one that cannot be read."""
        try:
            return parse_size(text, where=where)
        except UnitError as error:
            self._errors.append(error)
            return 0

    def check(self) -> None:
        """Refuse what was kept: as it was refused, where that is one thing.

        Raises:
            TonnageError: With every problem.
        """
        if len(self._errors) == 1:
            raise self._errors[0]
        raise_if_any(UnitError, (problem for error in self._errors for problem in error.problems))


def _check_share(utilization: str | None, engine: Engine) -> None:
    """Refuse the share that vLLM takes of a GPU for engines that take none so.

    Raises:
        UnitError: It is one.
    """
    if utilization is not None and engine in ("sglang", "exllamav3"):
        what, expected = "the share that vLLM is started with", "--engine vllm"
        raise UnitError(Problem(where="--utilization", what=what, expected=expected, found=engine))


def _check_release(version: str | None) -> None:
    """Refuse what is no release.

    Raises:
        UnitError: It is none.
    """
    if version is not None and parse_release(version) is None:
        expected = "a release such as 0.33.0; leave it out for builds without one"
        raise UnitError(Problem(where="--engine-version", what="no release", expected=expected, found=version))


def gpus_there(*, tp: int | None, pp: int, gpus: int | None) -> int:
    """Return the GPUs that a model may be shared over: those that are said, else those of one way, else 8.

    Raises:
        UnitError: One way takes more.
    """
    ranks = (tp or 1) * pp
    there = gpus or (ranks if tp is not None else _GPUS)
    if ranks > there:
        found = f"{ranks} ranks"
        raise UnitError(Problem(where="--tp, --pp", what="more ranks than GPUs", expected=str(there), found=found))
    return there
