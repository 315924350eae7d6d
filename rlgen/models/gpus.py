"""What vendors publish about their GPUs: the only place for it."""

from dataclasses import dataclass

USABLE = 0.93  # GiB of a GB as sold, less what the driver holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Numbers of a data sheet."""

    names: tuple[str, ...]  # torch's names of the device
    tflops: float  # 10^12 dense operations a second in bfloat16
    memory_gb: float  # as sold
    memory_gbs: float  # GB a second between the memory and the cores
    link_gbs: float  # GB a second to another GPU of the same machine, in one direction: NVLink, or PCIe


# By the name that `rlgen estimate --gpu` takes.
GPUS = {
    "h200": Gpu(names=("NVIDIA H200",), tflops=989.5, memory_gb=141, memory_gbs=4800, link_gbs=450),
    "h100": Gpu(names=("NVIDIA H100 80GB HBM3",), tflops=989.5, memory_gb=80, memory_gbs=3350, link_gbs=450),
    "h100-pcie": Gpu(names=("NVIDIA H100 PCIe",), tflops=756.5, memory_gb=80, memory_gbs=2000, link_gbs=64),
    "a100": Gpu(names=("NVIDIA A100-SXM4-80GB",), tflops=312.0, memory_gb=80, memory_gbs=2039, link_gbs=300),
    "a100-40": Gpu(names=("NVIDIA A100-SXM4-40GB",), tflops=312.0, memory_gb=40, memory_gbs=1555, link_gbs=300),
    "l40s": Gpu(names=("NVIDIA L40S",), tflops=362.0, memory_gb=48, memory_gbs=864, link_gbs=32),
}
