"""What a process can use on a GPU."""

from __future__ import annotations

import msgspec
import pytest

from tonnage.errors import UnitError, UnknownGpuError
from tonnage.memory.supply import Supply, find_gpu, gpu_table, parse_supply, supply_bytes

MIB = 1_048_576

# Worked by hand. With a torch total: MiB x 1,048,576. With printed GiB only: floor(GiB x 2**30) - 5,368,710
# (0.005 GiB, up). With a driver total only: (driver MiB - 640) x 1,048,576.
BYTES = {
    "rtx-pro-6000": (97_250 * MIB, 101_974_016_000, "calibrated"),
    "rtx-5090": (32_113 * MIB, 33_672_921_088, "calibrated"),
    "h100": (81_090 * MIB, 85_029_027_840, "calibrated"),
    "h200": (143_156 * MIB, 150_109_945_856, "calibrated"),
    "b200": (182_631 * MIB, 191_502_483_456, "calibrated"),
    "b300": (274_115 * MIB, 287_430_410_240, "calibrated"),
    "mi300x": (196_592 * MIB, 206_141_652_992, "calibrated"),
    "rtx-pro-5000-48gb": ((48_935 - 640) * MIB, 50_640_977_920, "assumed"),
    "gb10": (127_968_550_584 - 5_368_710, 127_963_181_874, "assumed"),
    "rtx-5080": (16_589_311_180 - 5_368_710, 16_583_942_470, "assumed"),
}


@pytest.mark.parametrize(("slug", "row"), BYTES.items())
def test_supply_of_gpu(slug: str, row: tuple[int, int, str]) -> None:
    rule, nbytes, basis = row
    supply = supply_bytes(find_gpu(slug))
    assert rule == nbytes
    assert (supply.nbytes, supply.basis) == (nbytes, basis)
    assert supply.source.startswith(f"gpus.json: {slug}, ")


def test_assumed_supply_says_why() -> None:
    assert supply_bytes(find_gpu("rtx-pro-5000-48gb")).source == (
        "gpus.json: rtx-pro-5000-48gb, torch total not reported: driver total 48935 MiB less 640 MiB"
    )
    assert supply_bytes(find_gpu("gb10")).source == (
        "gpus.json: gb10, smallest torch total reported, 119.18 GiB, less its rounding"
    )


@pytest.mark.parametrize(
    ("nominal_gb", "reserve_mib"), [(48, 640), (144, 640), (180, 740), (186, 740), (192, 740), (288, 1070)]
)
def test_reserve_is_the_larger_end_for_the_size_of_card(nominal_gb: int, reserve_mib: int) -> None:
    card = msgspec.structs.replace(find_gpu("rtx-pro-5000-48gb"), nominal_gb=nominal_gb, smi_total_mib=300_000)
    assert supply_bytes(card).nbytes == (300_000 - reserve_mib) * MIB


def test_the_marketing_figure_is_never_a_supply() -> None:
    unknown = msgspec.structs.replace(find_gpu("rtx-pro-5000-48gb"), smi_total_mib=None)
    with pytest.raises(UnknownGpuError, match="no usable total is known; expected --supply"):
        supply_bytes(unknown)
    huge = msgspec.structs.replace(find_gpu("rtx-pro-5000-48gb"), nominal_gb=999)
    with pytest.raises(UnknownGpuError, match="no reserve rule for a card of this size; found 999 GB"):
        supply_bytes(huge)


def test_every_gpu_has_its_own_slug_and_a_supply_below_the_driver_total() -> None:
    gpus = gpu_table().gpus
    assert len(gpus) == 32
    assert len({gpu.slug for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert find_gpu(gpu.slug) is gpu
        assert find_gpu(gpu.slug.replace("-", "")) is gpu
        supply = supply_bytes(gpu)
        assert gpu.smi_total_mib is None or supply.nbytes <= gpu.smi_total_mib * MIB
        assert supply.nbytes > gpu.nominal_gb * 800 * MIB


NAMES = {
    "RTX-PRO-6000": "rtx-pro-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000",
    "nvidia rtx pro 5000 blackwell": "rtx-pro-5000-48gb",
    "NVIDIA_H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "dgx spark": "gb10",
    "mi350x": "mi355x",
    "A100 80GB": "a100-80gb",
    "H100-80GB-HBM3": "h100",
    "H100 80GB": "h100",
    "RTX PRO 6000 Blackwell 96GB": "rtx-pro-6000",
    "RTX 5090 32GB": "rtx-5090",
    "GeForce RTX 3090 24GB": "rtx-3090",
    "RTX4090": "rtx-4090",
    "rtxpro6000": "rtx-pro-6000",
    "GeForce RTX4090": "rtx-4090",
}


@pytest.mark.parametrize(("name", "slug"), NAMES.items())
def test_a_gpu_is_found_by_slug_name_or_alias(name: str, slug: str) -> None:
    assert find_gpu(name).slug == slug


@pytest.mark.parametrize(
    "name", ["H100 96GB", "RTX 5090 Laptop 24GB", "RTX 5090 24GB", "A100", "4090", "RTX4090D", "RTX3090Ti", ""]
)
def test_another_size_or_another_card_is_not_the_one_of_the_table(name: str) -> None:
    with pytest.raises(UnknownGpuError):
        find_gpu(name)


def test_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu("rtx-pro-600")
    assert str(caught.value).startswith("--gpu: GPU is not in the table; expected rtx-pro-6000")
    assert str(caught.value).endswith("; found rtx-pro-600")
    with pytest.raises(UnknownGpuError, match="expected a name out of `tonnage gpus`; found zzz"):
        find_gpu("zzz")


def test_a_name_two_cards_report_is_refused_with_both() -> None:
    with pytest.raises(UnknownGpuError, match="expected rtx-6000-ada-ecc-on or rtx-6000-ada-ecc-off"):
        find_gpu("NVIDIA RTX 6000 Ada Generation")


def test_a_stated_supply_is_exact() -> None:
    assert parse_supply("94.010GiB") == Supply(nbytes=100_942_468_874, basis="exact", source="--supply")
    with pytest.raises(UnitError, match="--supply: not a size"):
        parse_supply("much")
    with pytest.raises(UnitError, match="--supply: no memory"):
        parse_supply("0GiB")
    with pytest.raises(ValueError, match="supply of -1 bytes"):
        Supply(nbytes=-1, basis="exact", source="--supply")
