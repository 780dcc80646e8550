"""GPU facts through NVML, which answers without torch and without touching the GPU's memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

MEMORY_TOLERANCE_BYTES = 256 * 1024 * 1024
MEMORY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment."""

    uuid: str
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    used_bytes: int
    driver: str


def list_gpus() -> list[Gpu]:
    """List the machine's NVIDIA GPUs; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def wait_for_memory(before: list[Gpu], timeout_s: float = MEMORY_TIMEOUT_S) -> list[str]:
    """Wait until the GPUs hold no more memory than before a launch.

    Returns:
        What is still held, one line per GPU; empty when all memory is back.
    """
    baseline = {gpu.uuid: gpu.used_bytes for gpu in before}
    deadline = time.monotonic() + timeout_s
    while True:
        held = [
            f"{gpu.name} {gpu.uuid}: {(gpu.used_bytes - baseline[gpu.uuid]) / 2**20:.0f} MiB"
            for gpu in list_gpus()
            if gpu.used_bytes > baseline.get(gpu.uuid, gpu.used_bytes) + MEMORY_TOLERANCE_BYTES
        ]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def _gpu(index: int) -> Gpu:
    import pynvml as nvml

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        driver=str(nvml.nvmlSystemGetDriverVersion()),
    )
