"""Kinds of GPU: lookup by the device name in torch, and the figures of the data sheets."""

import pytest

from m3diff.settings.compute import GPUS, gpu_of

GPU_BY_DEVICE = {
    "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA H200 NVL": "H200-NVL-141GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-40GB",  # of kinds that differ in memory alone, the smallest
    "NVIDIA A100 80GB PCIe": "A100-40GB",
    "NVIDIA GB200": "GB200-186GB",
    "NVIDIA L40S": "L40S-48GB",
    "NVIDIA L4": "L4-24GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090-24GB",
}
UNKNOWN_DEVICES = [
    "",
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA GH200 480GB",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "Tesla T4",
]


@pytest.mark.parametrize(("device", "kind"), GPU_BY_DEVICE.items())
def test_a_device_is_known_by_the_name_that_torch_gives_it(device: str, kind: str) -> None:
    assert gpu_of(device) == GPUS[kind]


@pytest.mark.parametrize("device", UNKNOWN_DEVICES)
def test_a_device_whose_name_only_begins_like_a_known_one_is_unknown(device: str) -> None:
    assert gpu_of(device) is None


def test_dense_peaks_are_those_of_the_data_sheets() -> None:
    peaks = {"A100-40GB": 312, "A100-80GB": 312, "H100-80GB": 989, "H200-141GB": 989, "RTX-4090-24GB": 165}
    peaks |= {"RTX-3090-24GB": 71, "A10-24GB": 125, "L40S-48GB": 362, "B200-180GB": 2250, "GB200-186GB": 2500}
    peaks |= {"H100-PCIe-80GB": 756, "H100-NVL-94GB": 835, "H200-NVL-141GB": 835, "L4-24GB": 121}
    assert {name: GPUS[name].bf16_tflops for name in peaks} == peaks
    for gpu in GPUS.values():
        assert gpu.name.endswith(f"-{gpu.memory_gb}GB")
