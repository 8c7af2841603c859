"""``tonnage serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from tonnage.cli.options import (
    Context,
    Dcp,
    Draft,
    DraftTokens,
    Eager,
    EngineVersion,
    EpOfCut,
    Free,
    GpuName,
    Json,
    KvBytes,
    KvDtype,
    Method,
    PpOfCut,
    ProfileName,
    Reserve,
    SupplySize,
    TpOfCut,
    Utilization,
    note,
)
from tonnage.cli.trust import CertificateChain, Identity, Issuer, Key, TrustConfig
from tonnage.errors import one_line


def serve(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="A signed package; others with --unsigned.")],
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Passed on to the engine as they are.")
    ] = None,
    engine: Annotated[
        Literal["vllm"], typer.Option("--engine", help="Which engine is started; there is only vllm so far.")
    ] = "vllm",
    key: Key = None,
    certificate_chain: CertificateChain = None,
    identity: Identity = None,
    issuer: Issuer = None,
    trust_config: TrustConfig = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Serve what nobody vouches for: a preparation, or a checkpoint.")
    ] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="With --key: weights are hashed by the engine's workers alone, as they load.")
    ] = False,
    device: Annotated[
        Literal["gpu", "cpu"] | None,
        typer.Option("--device", help="What the engine runs on; as it is built, if known."),
    ] = None,
    tp: TpOfCut = None,
    ep: EpOfCut = None,
    pp: PpOfCut = None,
    dcp: Dcp = 1,
    gpu: GpuName = None,
    supply: SupplySize = None,
    free: Free = None,
    utilization: Utilization = None,
    reserve: Reserve = "0",
    profile: ProfileName = None,
    context: Context = None,
    kv_dtype: KvDtype = None,
    kv_bytes: KvBytes = None,
    engine_version: EngineVersion = None,
    eager: Eager = False,
    draft: Draft = None,
    draft_method: Method = None,
    draft_tokens: DraftTokens = None,
    engine_command: Annotated[
        str | None, typer.Option("--engine-command", help="How the engine is started, such as 'vllm serve'.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; by default this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen at.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; by default the name of the package.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Start, measure, save and stop.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the command, and start nothing.")
    ] = False,
    timeout: Annotated[int, typer.Option("--timeout", min=1, help="Seconds the engine has to get ready.")] = 1800,
    grace: Annotated[int, typer.Option("--grace", min=0, help="Seconds it has to end by itself.")] = 30,
    run: Annotated[
        Path | None, typer.Option("--run", help="New directory for log, plan and record; by default in ~/.local/state.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the record to this new file as well.")] = None,
    log_limit: Annotated[str, typer.Option("--log-limit", help="Most the log may take on the disk.")] = "64MiB",
    show_log: Annotated[bool, typer.Option("--show-log", help="Print what the engine says, on stderr.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a package as planned, and say what it really holds.

    It is verified and planned against the memory that is free now, and refused before anything is started if either
    says no (exit codes 4 and 3). When the engine is ready, planned stands beside measured, and the record is saved. A
    measurement over its bound is said at once and ends in exit code 5, whenever the engine is ended. With --dry-run all
    is refused that would be, and nothing is started.

    Example: tonnage serve ./package --key release.pub.pem --profile c4-p4096 --context 32768
    """
    from tonnage.cli import serve_steps as step
    from tonnage.cli.observe import check_new
    from tonnage.cli.opening import Opening
    from tonnage.cli.serve_session import Session
    from tonnage.plan_options import plan_request
    from tonnage.serve.io import check_free, check_outside, claimed, find_program, make_run_directory, run_directory
    from tonnage.serve.log import limit_of
    from tonnage.serve.run import Launch, run_engine
    from tonnage.serve.source import open_served
    from tonnage.serve.words import Address, engine_words, unsaid

    trust = step.trusted(key, certificate_chain, identity, issuer, trust_config, unsigned=unsigned, fast=fast)
    words, log_bytes = step.extra_words(extra), limit_of(log_limit)
    if save is not None:
        check_new(save)
        check_outside(save, package, option="--save FILE")
    program = find_program(engine_command)
    if trust is not None:
        step.verify(package, trust, fast=fast)
    served = open_served(package)
    served.check(engine)
    step.check_hashed(served, fast=fast)
    sizes = served.sizes(tp=tp, ep=ep, pp=pp)
    memory = step.asked_memory(
        device or program.device, sizes.world_size, gpu=gpu, supply=supply, free=free, utilization=utilization
    )
    what, longest = step.profile(served, profile, context)
    request = plan_request(
        tp=sizes.tp, ep=sizes.ep, pp=sizes.pp, dcp=dcp, engine=engine, gpu=gpu, supply=supply, free=memory.free,
        utilization=utilization, reserve=reserve, profile=what, context=longest, kv_dtype=kv_dtype, kv_bytes=kv_bytes,
        engine_version=engine_version or step.known_release(program), eager=eager,
        draft=Opening().draft(draft, draft_method),
        draft_method=draft_method, draft_tokens=draft_tokens,
    )  # fmt: skip
    request, plan = step.judged(served, memory.of(request), as_json=as_json)
    address = Address(host=host, port=port, name=name or served.name)
    command, document = step.command(
        served, request, plan, memory, draft=draft, utilization=utilization, public_key=key if trust else None
    )
    launched = engine_words(command, program, address, words)
    check_free(address)
    with claimed(port) as descriptors:
        directory, environment = (
            run_directory(run, served.name, served.directory, os.environ),
            step.engine_variables(memory),
        )
        if dry_run:
            step.emit_dry_run(
                served, request, plan, document, launched, environment, verified=trust is not None, as_json=as_json
            )
            return
        make_run_directory(directory)
        launch = Launch(
            words=launched, environment=environment, address=address, directory=directory,
            log_bytes=log_bytes, ready_seconds=timeout, grace_seconds=grace, check=check, inherited=descriptors,
        )  # fmt: skip
        session = Session(
            served=served, request=request, plan=plan, document=document, launch=launch, verified=trust is not None,
            save=save, as_json=as_json,
        )  # fmt: skip
        session.begin()
        show = (lambda line: note(one_line(unsaid(line, launched, environment)))) if show_log else None
        ran = run_engine(launch, session.ready, show)
    raise typer.Exit(session.end(ran))
