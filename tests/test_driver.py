"""The driver of this machine's GPUs, by a stand-in for its library."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tonnage.errors import DriverError
from tonnage.memory.devices import DeviceMemory, free_supply, select_devices
from tonnage.memory.driver import read_devices
from tonnage.memory.supply import gpu_of_driver
from tonnage.memory.workspace_shape import gpu_class

MIB, GIB = 1 << 20, 1 << 30
NOT_SUPPORTED, NOT_FOUND, UNKNOWN_FUNCTION, LOST = 3, 6, 13, 15


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class Library:
    """NVML's functions over a list of cards; ``slices`` of a card are cards of their own."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028  # noqa: N815 - the library's name

    def __init__(self, *cards: SimpleNamespace, init: int = 0, second_version: bool = True) -> None:
        self.cards, self.init, self.second_version, self.running = cards, init, second_version, 0

    def nvmlInit(self) -> None:  # noqa: N802 - the library's name
        if self.init:
            raise NVMLError(self.init)
        self.running += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:  # noqa: N802
        return self.cards[index]

    def nvmlDeviceGetName(self, card: SimpleNamespace) -> str | bytes:  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card: SimpleNamespace) -> str | bytes:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card: SimpleNamespace, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        if card.error:
            raise NVMLError(card.error)
        if version is None:
            return SimpleNamespace(total=card.total, used=card.total - card.free, free=card.free)
        assert version == self.nvmlMemory_v2
        if not self.second_version:
            raise NVMLError(UNKNOWN_FUNCTION)
        used = card.total - card.reserved - card.free
        return SimpleNamespace(total=card.total, reserved=card.reserved, used=used, free=card.free)

    def nvmlDeviceGetMigMode(self, card: SimpleNamespace) -> list[int]:  # noqa: N802
        if card.slices is None:
            raise NVMLError(NOT_SUPPORTED)
        return [int(bool(card.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: SimpleNamespace) -> int:  # noqa: N802
        return len(card.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: SimpleNamespace, number: int) -> SimpleNamespace:  # noqa: N802
        if card.slices[number] is None:
            raise NVMLError(NOT_FOUND)
        return card.slices[number]


def card(free_mib: int, **changes: object) -> SimpleNamespace:
    facts = {
        "name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "uuid": "GPU-5e3a", "total": 97_887 * MIB,
        "reserved": 637 * MIB, "free": free_mib * MIB, "slices": None, "error": 0,
    }  # fmt: skip
    return SimpleNamespace(**facts | changes)


def test_a_gpu_is_read_with_what_the_driver_keeps() -> None:
    library = Library(card(96_000))
    (device,) = read_devices(library)
    assert device == DeviceMemory(
        index=0,
        uuid="GPU-5e3a",
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        total_bytes=97_887 * MIB,
        free_bytes=96_000 * MIB,
        reserved_bytes=637 * MIB,
    )
    assert device.engine_total_bytes == 97_250 * MIB  # the total PyTorch reports on this card
    assert device.used_bytes == 1250 * MIB
    assert library.running == 0


def test_older_drivers_do_not_tell_what_they_keep() -> None:
    (device,) = read_devices(Library(card(96_000), second_version=False))
    assert (device.reserved_bytes, device.engine_total_bytes, device.used_bytes) == (None, None, 1887 * MIB)


def test_older_libraries_give_bytes() -> None:
    (device,) = read_devices(Library(card(1, name=b"NVIDIA L4", uuid=b"GPU-\xff")))
    assert (device.name, device.uuid) == ("NVIDIA L4", "GPU-�")


def test_slices_stand_for_a_gpu_in_mig_mode() -> None:
    slices = [card(9000, uuid="MIG-1", total=9984 * MIB, reserved=0), None, card(8000, uuid="MIG-3", total=9984 * MIB)]
    devices = read_devices(Library(card(90_000, slices=[]), card(1, slices=slices, name="NVIDIA A100-SXM4-80GB")))
    assert [(d.label, d.uuid, d.free_bytes, d.name) for d in devices[1:]] == [
        ("GPU 1 slice 0", "MIG-1", 9000 * MIB, "NVIDIA A100-SXM4-80GB"),
        ("GPU 1 slice 2", "MIG-3", 8000 * MIB, "NVIDIA A100-SXM4-80GB"),
    ]
    assert devices[0].label == "GPU 0"


REFUSALS = {
    "no driver": (Library(init=9), "the driver does not answer; expected --gpu NAME or --supply SIZE; found code 9"),
    "no GPU": (Library(), "the driver knows no GPU; expected --gpu NAME or --supply SIZE"),
    "memory of the host": (
        Library(card(1, error=NOT_SUPPORTED)),
        "the driver does not tell the memory of a GPU; expected --gpu NAME or --supply SIZE; found code 3",
    ),
    "a lost GPU": (
        Library(card(1), card(1, error=LOST)),
        "the driver does not tell the memory of a GPU; expected --gpu NAME or --supply SIZE; found code 15",
    ),
}


@pytest.mark.parametrize("row", REFUSALS.values(), ids=REFUSALS)
def test_a_driver_that_cannot_be_asked_is_one_line(row: tuple[Library, str]) -> None:
    library, line = row
    with pytest.raises(DriverError) as caught:
        read_devices(library)
    assert str(caught.value) == f"--free: {line}"
    assert library.running == 0


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what import takes for "not installed"
    with pytest.raises(DriverError) as caught:
        read_devices()
    assert str(caught.value) == (
        "--free: the library that asks the driver is not installed; expected pip install 'tonnage[nvml]', or "
        "--gpu NAME or --supply SIZE"
    )


def test_the_installed_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library(card(5)))
    assert read_devices()[0].free_bytes == 5 * MIB


DEVICES = read_devices(
    Library(card(9000, uuid="GPU-aa1"), card(7000, uuid="GPU-aa2"), card(8000, uuid="GPU-b"), card(0, uuid="GPU-c"))
)


def test_supply_is_what_is_free_on_the_fullest_gpu_that_is_used() -> None:
    supply = free_supply(DEVICES, 3)
    assert (supply.nbytes, supply.basis) == (7000 * MIB, "exact")
    assert supply.source == (
        "driver: least free of 3: GPU 1, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 88.13 GiB held by processes"
    )
    assert free_supply(DEVICES, 1).nbytes == 9000 * MIB
    assert free_supply(DEVICES, 1).source.startswith("driver: GPU 0, ")
    assert free_supply(select_devices(DEVICES, "2,0", where="--free"), 2).nbytes == 8000 * MIB


def test_supply_needs_a_gpu_per_rank_with_something_free() -> None:
    with pytest.raises(DriverError, match="fewer GPUs than ranks; expected 8; found 4"):
        free_supply(DEVICES, 8)
    with pytest.raises(DriverError, match="nothing is free; found GPU 3"):
        free_supply(DEVICES, 4)


def test_gpus_are_chosen_by_number_or_by_the_beginning_of_a_uuid() -> None:
    assert [d.index for d in select_devices(DEVICES, " 3, GPU-b,GPU-aa2", where="--free")] == [3, 2, 1]


WRONG_CHOICES = {
    "two": ("GPU-aa", "names several GPUs"),
    "unknown number": ("4", "names no GPU of this machine"),
    "nothing": ("", "names no GPU of this machine"),
    "negative": ("-1", "names no GPU of this machine"),
    "other digits": ("\u0661", "names no GPU of this machine"),
    "twice": ("0,GPU-aa1", "names a GPU twice"),
    "a hole": ("0,,1", "names no GPU of this machine"),
}


@pytest.mark.parametrize("row", WRONG_CHOICES.values(), ids=WRONG_CHOICES)
def test_a_choice_that_is_none_is_refused(row: tuple[str, str]) -> None:
    text, what = row
    with pytest.raises(DriverError, match=f"CUDA_VISIBLE_DEVICES: {what}"):
        select_devices(DEVICES, text, where="CUDA_VISIBLE_DEVICES")


def test_a_whole_gpu_is_meant_by_a_number_and_never_its_slice() -> None:
    devices = read_devices(Library(card(1, slices=[card(1, uuid="MIG-1", total=9984 * MIB)])))
    with pytest.raises(DriverError, match="names no GPU"):
        select_devices(devices, "0", where="--free")
    assert select_devices(devices, "MIG-1", where="--free") == devices


def test_table_entries_are_found_by_the_name_and_total_of_the_driver() -> None:
    name = "NVIDIA RTX 6000 Ada Generation"
    assert gpu_of_driver(name, 46_068 * MIB).slug == "rtx-6000-ada-ecc-on"
    assert gpu_of_driver(name, 49_140 * MIB).slug == "rtx-6000-ada-ecc-off"
    assert gpu_class(gpu_of_driver("NVIDIA H100 80GB HBM3", 81_559 * MIB)) == "hopper"
    assert gpu_of_driver("NVIDIA GeForce GTX 1060", 6144 * MIB) is None


@pytest.mark.parametrize("memory", [(10, 11, None), (10, -1, None), (10, 5, 11), (10, 5, -1)])
def test_memory_no_driver_reports_is_no_value(memory: tuple[int, int, int | None]) -> None:
    total, free, reserved = memory
    with pytest.raises(ValueError, match="GPU 0: "):
        DeviceMemory(index=0, uuid="", name="", total_bytes=total, free_bytes=free, reserved_bytes=reserved)
