"""What the driver of this machine's NVIDIA GPUs says about their memory, through NVML.

The one module of this package that asks a machine. The library (``nvidia-ml-py``, the extra ``nvml``) is imported when
it is needed; without it, or without a driver, the refusal is one line. Nothing is changed on any GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tonnage.errors import DriverError, Problem
from tonnage.memory.devices import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_DEVICES = 1 << 8
MIG_ENABLED = 1
_INSTEAD = "--gpu NAME or --supply SIZE"
_NOT_SUPPORTED, _NOT_FOUND, _FUNCTION_NOT_FOUND, _INVALID_ARGUMENT = 3, 6, 13, 2


def read_devices(nvml: Any = None) -> tuple[DeviceMemory, ...]:
    """Return the memory of every GPU, in PCI order; of a GPU in MIG mode that of its slices.

    Args:
        nvml: The library's module, or one with its functions; by default the installed one.

    Raises:
        DriverError: There is no library, no driver, no GPU, or one of them does not tell its memory.
    """
    nvml = _library() if nvml is None else nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _refused("the driver does not answer", error) from None
    try:
        devices = tuple(_read(nvml))
    except nvml.NVMLError as error:
        raise _refused("the driver does not tell the memory of a GPU", error) from None
    finally:
        nvml.nvmlShutdown()
    if not devices:
        raise DriverError(Problem(where="--free", what="the driver knows no GPU", expected=_INSTEAD))
    return devices


def _library() -> Any:
    try:
        return import_module("pynvml")
    except ImportError:
        raise DriverError(
            Problem(
                where="--free",
                what="the library that asks the driver is not installed",
                expected=f"pip install 'tonnage[nvml]', or {_INSTEAD}",
            )
        ) from None


def _read(nvml: Any) -> Iterator[DeviceMemory]:
    for index in range(min(nvml.nvmlDeviceGetCount(), MOST_DEVICES)):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if not _sliced(nvml, handle):
            yield _device(nvml, handle, index)
            continue
        name = _text(nvml.nvmlDeviceGetName(handle))
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            part = _slice(nvml, handle, number)
            if part is not None:
                yield _device(nvml, part, index, number, name)


def _sliced(nvml: Any, handle: Any) -> bool:
    """Whether a GPU is in MIG mode now; most cards do not know the question."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
            return False
        raise
    return bool(current == MIG_ENABLED)


def _slice(nvml: Any, handle: Any, number: int) -> Any:
    """Return the handle of a slice; numbers without one are normal."""
    try:
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
    except nvml.NVMLError as error:
        if error.value in (_NOT_FOUND, _INVALID_ARGUMENT):
            return None
        raise


def _device(
    nvml: Any, handle: Any, index: int, slice_index: int | None = None, name: str | None = None
) -> DeviceMemory:
    """Return the memory of one GPU or slice; older drivers do not tell what they keep for themselves."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except nvml.NVMLError as error:
        if error.value not in (_FUNCTION_NOT_FOUND, _NOT_SUPPORTED, _INVALID_ARGUMENT):
            raise
        memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), None
    return DeviceMemory(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)) if name is None else name,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        reserved_bytes=reserved,
        slice_index=slice_index,
    )


def _text(value: str | bytes) -> str:
    """Return a text of the library, which older versions give as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _refused(what: str, error: Exception) -> DriverError:
    return DriverError(Problem(where="--free", what=what, expected=_INSTEAD, found=str(error)))
