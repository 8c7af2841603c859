"""What an engine logs as weights beyond parameters: named lines, so that parameters and lines are the logged figure.

vLLM prints the bytes of torch's allocator after loading, SGLang the difference of free memory. Both hold rotary tables,
padding of kernels, copies, and the rounding of the allocator. Parameters, and what the engine's classes create beside
them, are in the placement; what grows with the tokens of a step is in :mod:`tonnage.logged.step_buffers`.

Source:
    vLLM 0.32.0 ``v1/worker`` ("Model loading took"); SGLang 0.5.23 "Load weight end". Compared with published logs in
    ``docs/weights-agreement.md``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tonnage.logged.allocator import HeldTensors, allocator_line, held_tensors
from tonnage.logged.experts import backend_of, expert_padding, expert_stacks
from tonnage.logged.linears import absorbed_copies, emulated_weights, linear_padding, quantised_linears
from tonnage.logged.rotary import rotary_line
from tonnage.memory.term import Term
from tonnage.recipes.modules import TOWER_ROLES
from tonnage.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tonnage.placement import Placement

ENGINES = ("vllm", "sglang")
REALLOCATED = "engine.reallocated"
REALLOCATED_EACH = 2 * MIB
REALLOCATED_FROM = 20 * MIB
TOWERS = "engine.tower_buffers"
TOWERS_MOST = 96 * MIB
DRIVER = "engine.modules"
DRIVER_MOST = 256 * MIB
_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)


def logged_lines(
    placement: Placement,
    *,
    pp_rank: int,
    tp_rank: int,
    gpu_arch: str | None = None,
    engine_version: str | None = None,
    moe_backend: str | None = None,
) -> tuple[Term, ...]:
    """Return what an engine logs as weights on one rank beyond the placement's bytes.

    The sum of a placement's rank bytes and these terms is the figure a start-up log gives: expected, and at most.

    Args:
        placement: Made by the rules of ``vllm`` or ``sglang``; other engines log no such figure, so there are no lines.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank.
        gpu_arch: Compute capability as the GPU table has it, such as ``9.0`` or ``gfx942``; ``None`` if not known.
        engine_version: Release of the engine; ``None`` or text without a number stands for the newest known.
        moe_backend: Kernel of routed experts, as the engine's option or log names it; ``None`` leaves it open.

    Raises:
        PlacementError: The kernel of routed experts is unknown here.
    """
    engine = placement.engine.name
    if engine not in ENGINES:
        return ()
    version, gpu_class = release_of(engine_version), gpu_class_of(gpu_arch)
    backend = backend_of(moe_backend) if moe_backend else None
    tensors = held_tensors(placement, pp_rank, tp_rank)
    stacks = expert_stacks(placement, pp_rank, tp_rank)
    linears = quantised_linears(placement, pp_rank, tp_rank)
    vllm_version = version if engine == "vllm" else None
    lines = [
        *rotary_line(placement.assignment.blueprint.config, engine=engine, version=version),
        *expert_padding(stacks, engine=engine, gpu_class=gpu_class, version=vllm_version, backend=backend),
        *linear_padding(linears, gpu_class=gpu_class, engine=engine),
    ]
    if engine == "vllm":
        lines.extend(absorbed_copies(placement, pp_rank, tp_rank))
    lines.extend(allocator_line(tensors, engine=engine, version=version))
    lines.extend(_reallocated(tensors))
    lines.extend(_tower_buffers(placement))
    if engine == "sglang":
        lines.append(_driver_modules())
    return tuple(lines)


def cpu_lines(
    placement: Placement, *, pp_rank: int, tp_rank: int, engine_version: str | None = None
) -> tuple[Term, ...]:
    """Return what vLLM keeps of the weights on a CPU beyond the placement's bytes.

    Args:
        placement: Made by the rules of ``vllm``.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank.
        engine_version: Release of the engine; ``None`` or text without a number stands for the newest known.
    """
    config = placement.assignment.blueprint.config
    return (
        *rotary_line(config, engine="vllm", version=release_of(engine_version)),
        *absorbed_copies(placement, pp_rank, tp_rank),
        *emulated_weights(placement, pp_rank, tp_rank),
    )


def _reallocated(tensors: tuple[HeldTensors, ...]) -> Iterator[Term]:
    """Yield the bound for large tensors a kernel writes anew: they may land in larger blocks freed before."""
    count = sum(tensor.count for tensor in tensors if tensor.rewritten and tensor.nbytes >= REALLOCATED_FROM)
    if count:
        yield Term(
            component=REALLOCATED,
            nbytes=0,
            bound_nbytes=count * REALLOCATED_EACH,
            basis="assumed",
            source=f"{count} large tensors written anew after loading, each in a block up to 2 MiB too large",
        )


def _tower_buffers(placement: Placement) -> Iterator[Term]:
    """Yield the bound for tables and positions towers of images and sound keep beside their weights."""
    if any(placed.entry.module.rule.role in TOWER_ROLES for placed in placement.placed):
        yield Term(
            component=TOWERS,
            nbytes=0,
            bound_nbytes=TOWERS_MOST,
            basis="assumed",
            source="tables and positions of vision and audio towers; up to 27 MiB seen",
        )


def _driver_modules() -> Term:
    return Term(
        component=DRIVER,
        nbytes=0,
        bound_nbytes=DRIVER_MOST,
        basis="assumed",
        source="kernels the driver loads meanwhile: SGLang logs the difference of free memory",
    )


def release_of(text: str | None) -> tuple[int, ...] | None:
    """Return a release as numbers, ``None`` where the text names none.

    >>> release_of("0.20.2rc1.dev249 (fork image)")
    (0, 20, 2)
    """
    found = _RELEASE.search(text) if text else None
    return tuple(int(part) for part in found.groups() if part) if found else None


def gpu_class_of(gpu_arch: str | None) -> str:
    """Return the class of kernels a GPU runs: ``sm80``, ``sm89``, ``sm90``, ``sm100``, ``sm120``, ``amd``, or empty.

    >>> gpu_class_of("12.1")
    'sm120'
    """
    if not gpu_arch:
        return ""
    if gpu_arch.startswith("gfx"):
        return "amd"
    major, _, minor = gpu_arch.partition(".")
    if not (major.isascii() and major.isdigit() and len(major) < len("100") and minor.isascii() and minor.isdigit()):
        return ""
    if major == "8":
        return "sm89" if minor == "9" else "sm80"
    return {"7": "sm80", "9": "sm90", "10": "sm100", "11": "sm120", "12": "sm120"}.get(major, "")
