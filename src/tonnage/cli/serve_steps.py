"""What ``tonnage serve`` decides before it starts anything: by whom it is signed, on what it runs, whether it fits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tonnage.api import PlanRequest, plan_checkpoint
from tonnage.cli.cut import made_for
from tonnage.cli.options import emit, emit_json, note
from tonnage.cli.plan import DOES_NOT_FIT
from tonnage.cli.progress import later, progress
from tonnage.cli.trust import WAYS_OF_TRUST, trust_of
from tonnage.errors import DriverError, Problem, UnitError, one_line
from tonnage.export.signature import PublicKey, Trust
from tonnage.export.verify import VerifyRequest, verify_package
from tonnage.flags.command import serve_command
from tonnage.flags.from_plan import serve_plan
from tonnage.launch import draft_plan
from tonnage.memory.supply import Supply, parse_supply, supply_bytes
from tonnage.memory.workspace_shape import parse_release
from tonnage.report.documents import plan_document
from tonnage.serve.io import machine_supply
from tonnage.serve.words import Program, engine_environment, masked, overridden, runs_remote_code
from tonnage.suggestions import suggest
from tonnage.supply_options import free_gpus, read_share
from tonnage.topology import Device
from tonnage.units import counted, unit_for

if TYPE_CHECKING:
    from tonnage.flags.values import ServeCommand
    from tonnage.memory.devices import DeviceMemory
    from tonnage.plan import Plan
    from tonnage.serve.source import Served


def trusted(
    key: Path | None,
    chain: list[Path] | None,
    identity: str | None,
    issuer: str | None,
    trust_config: Path | None,
    *,
    unsigned: bool,
    fast: bool,
) -> Trust | None:
    """Return by whom it must be signed; ``None`` where the user says that nobody need have.

    Raises:
        UnitError: Neither is said, or both.
    """
    trust, ways = None, f"{WAYS_OF_TRUST}; or --unsigned"
    if not unsigned:
        trust = trust_of(key, chain, identity, issuer, trust_config, where="serve", ways=ways)
    elif any((key, chain, identity, issuer, trust_config)):
        raise UnitError(Problem(where="serve", what="by whom it must be signed", expected=ways))
    if fast and not isinstance(trust, PublicKey):
        raise UnitError(Problem(where="--fast", what="nobody would hash the weights", expected="--key beside it"))
    return trust


def extra_words(extra: list[str] | None) -> tuple[str, ...]:
    """Return what is passed on; a warning if that lets the engine execute what is served.

    Raises:
        UnitError: It does not begin with a flag: probably a second package.
    """
    words = tuple(extra or ())
    if words and not words[0].startswith("-"):
        raise UnitError(
            Problem(where=masked(words)[0], what="no flag of the engine", expected="one package; -- before flags")
        )
    if runs_remote_code(words):
        note("warning: --trust-remote-code lets the engine execute what is in the package")
    return words


def verify(directory: Path, trust: Trust, *, fast: bool) -> None:
    """Verify a package, and say so.

    Raises:
        VerifyError: It is not what was signed.
    """
    with progress() as show:
        found = verify_package(directory, trust, VerifyRequest(fast=fast), later(show))
    found.check()
    assert found.manifest is not None
    unit, text = unit_for(found.nbytes)
    how = "headers only; the engine's workers hash the weights" if fast else f"{found.hashed_bytes:,} bytes hashed"
    note(
        f"verified: {one_line(found.manifest.name)}, {counted(found.files, 'file')}, {text(found.nbytes)} {unit}, {how}"
    )


def check_hashed(served: Served, *, fast: bool) -> None:
    """Refuse to leave hashing to workers that do not.

    Raises:
        UnitError: It is a standard checkpoint, which the engine reads by itself.
    """
    if fast and served.layout != "tp":
        what = "nobody would hash the weights of a standard checkpoint"
        raise UnitError(Problem(where="--fast", what=what, expected="leave it out"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedMemory:
    """What the engine runs on.

    Attributes:
        device: Of the engine.
        free: GPUs the driver is asked about, as ``--free`` takes them; ``None`` to ask no driver.
        gpus: Those the ranks run on.
        cpu_supply: Of one rank, on a CPU.
    """

    device: Device
    free: str | None = None
    gpus: tuple[DeviceMemory, ...] = ()
    cpu_supply: Supply | None = None

    def of(self, request: PlanRequest) -> PlanRequest:
        """Return a request with what this device supplies."""
        if self.cpu_supply is None:
            return request
        return replace(request, device="cpu", supply=self.cpu_supply, context_held=False)

    @property
    def visible(self) -> tuple[str, ...]:
        """The GPUs as the engine is told: by number, slices by name."""
        return tuple(gpu.uuid if gpu.slice_index is not None else str(gpu.index) for gpu in self.gpus)

    @property
    def total_bytes(self) -> int | None:
        """Total of the smallest of them, as an allocator sees it."""
        return min((gpu.engine_total_bytes or gpu.total_bytes for gpu in self.gpus), default=None)


def asked_memory(
    device: Device, ranks: int, *, gpu: str | None, supply: str | None, free: str | None, utilization: str | None
) -> AskedMemory:
    """Return what it runs on: as options say, else what is free now on the GPUs or in this machine.

    Raises:
        TonnageError: An option is of the other device, or nobody says what is free.
    """
    if device == "cpu":
        given = {"--gpu": gpu, "--free": free, "--utilization": utilization}
        for option, value in given.items():
            if value is not None:
                what = "the engine runs on a CPU"
                raise UnitError(Problem(where=option, what=what, expected="--supply, or --device gpu", found=value))
        return AskedMemory(device="cpu", cpu_supply=machine_supply(ranks) if supply is None else parse_supply(supply))
    if gpu is not None or supply is not None:
        return AskedMemory(device="gpu")
    asked = free or os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
    try:
        gpus = free_gpus(asked, where="--free" if free else "CUDA_VISIBLE_DEVICES")
    except DriverError as error:
        hint = Problem(where="--device", what="is taken to be gpu", expected="--device cpu for an engine on a CPU")
        raise DriverError(*error.problems, hint) from error
    return AskedMemory(device="gpu", free=asked, gpus=gpus[:ranks])


def profile(served: Served, name: str | None, context: int | None) -> tuple[str, int | None]:
    """Return what is to be served: as asked, else what the package was made for.

    Raises:
        UnitError: Nobody says it.
    """
    name, context = made_for(served, name, context)
    if name is None:
        raise UnitError(Problem(where="--profile", what="what is to be served", expected="cC-pP such as c4-p4096"))
    return name, context


def known_release(program: Program) -> str | None:
    """Return the engine's version, where it is a release."""
    return program.release if parse_release(program.release) is not None else None


def judged(served: Served, request: PlanRequest, *, as_json: bool) -> tuple[PlanRequest, Plan]:
    """Return request and plan; a plan that does not fit ends the command as ``tonnage plan`` would.

    On a CPU the cache gets what the profile needs: what is left there belongs to other programs, too.

    Raises:
        TonnageError: The plan cannot be made, or is of other weights than on record.
        Exit: It does not fit.
    """
    checkpoint = served.checkpoint
    plan = plan_checkpoint(checkpoint, request)
    served.check_plan(plan)
    if plan.fits:
        if request.device == "cpu" and request.kv_bytes is None:
            request = replace(request, kv_bytes=max(ledger.cache_bytes for ledger in plan.ranks) or None)
            plan = plan_checkpoint(checkpoint, request)
        return request, plan
    suggestions = served.suggested(suggest(checkpoint, request))
    if as_json:
        emit_json(plan_document(checkpoint, request, plan, suggestions))
    else:
        from tonnage.report.tables import plan_table, render

        emit(render(plan_table(checkpoint, request, plan, suggestions)))
    note("nothing was started")
    raise typer.Exit(DOES_NOT_FIT)


def command(
    served: Served,
    request: PlanRequest,
    plan: Plan,
    memory: AskedMemory,
    *,
    draft: str | None,
    utilization: str | None,
    public_key: Path | None,
) -> tuple[ServeCommand, dict[str, Any]]:
    """Return the engine's command with everything memory depends on, and the plan's document with the cache it gives.

    Raises:
        FlagsError: The engine has no flag for something.
    """
    by_driver = memory.total_bytes is not None and request.supply is not None
    of_table = supply_bytes(request.gpu).nbytes if request.gpu and request.context_held else None
    key = str(public_key.absolute()) if public_key is not None and served.layout == "tp" else None
    serve = serve_plan(
        plan,
        request.profile,
        model=str(served.directory),
        release=request.version,
        gpu_bytes=request.supply.nbytes if by_driver and request.supply else of_table,
        draft=draft_plan(request, None if draft is None else str(Path(draft).absolute())),
        eager=request.eager,
        layout=served.layout,
        public_key=key,
        utilization=read_share(utilization),
    )
    if by_driver:
        serve = replace(serve, total_bytes=memory.total_bytes)
    found = serve_command(serve)
    for text in found.notes:
        note(f"note: {text}")
    document = plan_document(served.checkpoint, request, plan, ())
    document["cache"]["given_bytes"] = serve.kv_bytes
    return found, document


def emit_dry_run(
    served: Served,
    request: PlanRequest,
    plan: Plan,
    document: dict[str, Any],
    words: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    verified: bool,
    as_json: bool,
) -> None:
    """Print the plan, and the command with the variables it is given beyond those of this process."""
    variables = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    if as_json:
        facts = {"package": served.name, "kind": served.kind, "verified": verified, "device": request.device}
        command = {"words": list(masked(words)), "environment": variables}
        emit_json({"schema": "tonnage.serve-dry-run/1", **facts, **command, "plan": document})
        return
    from tonnage.report.tables import plan_table, render

    emit(render(plan_table(served.checkpoint, request, plan, ())))
    emit(shlex.join((*(f"{name}={value}" for name, value in sorted(variables.items())), *masked(words))))
    if not verified:
        note(f"warning: {one_line(served.name)} is not verified: --unsigned")
    note("nothing was started (--dry-run)")


def engine_variables(memory: AskedMemory) -> dict[str, str]:
    """Return the engine's, and say which of the user's are not among them."""
    for name in overridden(os.environ):
        note(f"note: {name} is not passed on: the cache is the planned one")
    return engine_environment(os.environ, memory.visible)
