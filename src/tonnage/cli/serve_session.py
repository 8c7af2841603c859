"""What ``tonnage serve`` says and saves while an engine runs."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.cli.observe import save_record
from tonnage.cli.options import emit, json_text, note
from tonnage.errors import ObservationError, TonnageError, one_line
from tonnage.observe.io import Observed, hold_against, plan_of
from tonnage.prepare.documents import PLAN
from tonnage.prepare.io import write_whole
from tonnage.report.observation import excesses, observation_record
from tonnage.serve.outcome import Outcome, cache_shortfall
from tonnage.serve.words import masked, unsaid

if TYPE_CHECKING:
    from tonnage.api import PlanRequest
    from tonnage.plan import Plan
    from tonnage.serve.log import BoundedLog
    from tonnage.serve.run import Launch, Ran
    from tonnage.serve.source import Served

COMMAND, RECORD = "command.json", "observation.json"


@dataclass(slots=True, kw_only=True)
class Session:
    """One run: what is served as planned, and what was found.

    Attributes:
        served: What is served.
        request: As it was planned.
        plan: One that fits.
        document: Of the plan.
        launch: What is started.
        verified: Whether it was verified.
        save: A second place for the record.
        as_json: Print a document, not a table.
        contradicts: Whether a measurement does.
        measured: Whether the log said anything, and the record is saved.
    """

    served: Served
    request: PlanRequest
    plan: Plan
    document: dict[str, Any]
    launch: Launch
    verified: bool
    save: Path | None
    as_json: bool
    contradicts: bool = field(default=False, init=False)
    measured: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Keep plan and command, and say what is started on what."""
        directory, supply = self.launch.directory, self.plan.supply
        assert supply is not None
        words = list(masked(self.launch.words))
        write_whole(directory / PLAN, json_text(self.document).encode() + b"\n")
        write_whole(directory / COMMAND, json.dumps({"words": words}, indent=2).encode() + b"\n")
        if not self.verified:
            note(f"warning: {one_line(self.served.name)} is not verified: --unsigned")
        from tonnage.units import unit_for

        unit, text = unit_for(supply.nbytes)
        spare = self.plan.spare_bytes(self.plan.binding_rank)
        fits = f"fits: supply {text(supply.nbytes)} {unit} per rank ({one_line(supply.source)})"
        note(fits + ("" if spare is None else f", spare {text(spare)} {unit}"))
        note(f"starting: {one_line(shlex.join(words))}")
        note(f"log, plan and record: {one_line(str(directory))}")

    def ready(self, seconds: float, log: BoundedLog) -> None:
        """Show planned against measured, and save the record."""
        address = self.launch.address
        observed = self._observed(log)
        shortfalls = () if observed is None else cache_shortfall(observed.observation, self.plan)
        self.contradicts = bool(shortfalls) or (observed is not None and observed.exceeds)
        if observed is not None:
            self.measured = self._save(observed) and bool(observed.observation.figures)
        if not self._show(observed, shortfalls, seconds) or self.as_json:  # the table says it itself
            for line in (*(excesses(observed) if observed else ()), *shortfalls):
                note(f"tonnage: {line}")
        if not self.launch.check:
            note(f"serving {one_line(address.name)} at {address.url}/v1, ready in {seconds:.1f} s; Ctrl-C ends it")

    def end(self, ran: Ran) -> int:
        """Say how it ended and return the exit code."""
        contradicts = self.contradicts
        if ran.end in ("died", "late") and not ran.ready:
            contradicts = self._refused()
        for line in ran.last_lines:
            note(f"engine: {self._shown(line)}")
        match ran.end:
            case "died":
                note(f"tonnage: the engine ended by itself, {_ended(ran.engine_code)}; log: {self._log}")
            case "late":
                seconds = self.launch.ready_seconds
                note(f"tonnage: not ready within {seconds:g} s (--timeout), ended; log: {self._log}")
            case "stopped":
                note("ended" if ran.ready else "ended before it was ready")
            case "checked":
                note("measured and ended")
        code = Outcome(end=ran.end, ready=ran.ready, signal=ran.signal, contradicts=contradicts).exit_code
        return 2 if code == 0 and self.launch.check and not self.measured else code

    def _shown(self, line: str) -> str:
        return one_line(unsaid(line, self.launch.words, self.launch.environment))

    @property
    def _log(self) -> str:
        from tonnage.serve.log import LOG

        return one_line(str(self.launch.directory / LOG))

    def _observed(self, log: BoundedLog) -> Observed | None:
        """Return what the log says beside the plan; where it says nothing of use, say why."""
        try:
            observed = hold_against(str(log.path), plan_of(self.document, where=PLAN))
        except ObservationError as error:
            for line in str(error).splitlines():
                note(f"tonnage: nothing measured: {line}")
            return None
        if log.lost:
            note(f"note: the log cannot be written: {log.lost}")
        if not log.begins_whole:
            note("note: the log began with more than half of --log-limit; what came later is not measured")
        return observed

    def _save(self, observed: Observed) -> bool:
        """Write the record; what cannot be written is no reason to end an engine that serves."""
        config = self.served.checkpoint.config.fields
        slug = self.request.gpu.slug if self.request.gpu else None
        record = observation_record(observed, gpu=slug, config=config)
        record |= {"device": self.request.device, "package": self.served.name, "source": "tonnage serve"}
        try:
            for path in (self.launch.directory / RECORD, self.save):
                if path is not None:
                    save_record(path, record)
        except TonnageError as error:
            for line in str(error).splitlines():
                note(f"tonnage: {line}")
            return False
        return True

    def _show(self, observed: Observed | None, shortfalls: tuple[str, ...], seconds: float) -> bool:
        """Print the table, or the document; whether that could be."""
        from tonnage.report.served import served_document, served_table
        from tonnage.report.tables import render

        try:  # making a table looks at the terminal it is for
            if self.as_json:
                slug = self.request.gpu.slug if self.request.gpu else None
                text = json_text(served_document(self._facts(seconds), observed, shortfalls, gpu=slug))
            else:
                text = "" if observed is None else render(served_table(observed, shortfalls))
            emit(text)
        except OSError as error:  # who read it has gone: no reason to end an engine that serves
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            note(f"note: the table cannot be printed: {error.strerror}")
            return False
        return observed is not None

    def _facts(self, seconds: float) -> dict[str, Any]:
        address, supply = self.launch.address, self.plan.supply
        assert supply is not None
        return {
            "package": self.served.name,
            "kind": self.served.kind,
            "verified": self.verified,
            "device": self.request.device,
            "supply_bytes": supply.nbytes,
            "supply": {"basis": supply.basis, "source": supply.source},
            "model": address.name,
            "url": address.url,
            "words": list(masked(self.launch.words)),
            "directory": str(self.launch.directory),
            "ready_seconds": round(seconds, 3),
        }

    def _refused(self) -> bool:
        """Whether an engine that did not get ready said that memory the plan counts on is not there."""
        from tonnage.serve.log import LOG

        try:
            observed = hold_against(str(self.launch.directory / LOG), None)
        except ObservationError:
            return False
        for reason in observed.observation.refusals:
            note(f"tonnage: the plan fits, and the engine refuses: {self._shown(reason)}")
        return bool(observed.observation.refusals)


def _ended(code: int | None) -> str:
    return f"by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
