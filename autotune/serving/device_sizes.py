"""The serving device as numbers: what its data sheet states, and what vLLM takes by default on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.serving.capabilities import FP8_ARITHMETIC_CAPABILITY
from autotune.serving.gpu import Gpu
from autotune.serving.sizes import DeviceSizes

GIB = 2**30
CPU_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable with the size of vLLM's KV cache on CPU, in GiB."""


@dataclass(frozen=True)
class Peaks:
    """Rates of a data sheet: memory bandwidth, and dense 16-bit arithmetic (without sparsity)."""

    bandwidth_bytes_per_s: float
    compute_flops_per_s: float


PEAKS: tuple[tuple[tuple[str, ...], Peaks], ...] = (
    (("B200",), Peaks(8.0e12, 2250e12)),
    (("H200", "NVL"), Peaks(4.8e12, 835e12)),
    (("H200",), Peaks(4.8e12, 989e12)),
    (("H100", "NVL"), Peaks(3.9e12, 835e12)),
    (("H100", "PCIe"), Peaks(2.0e12, 756e12)),
    (("H100",), Peaks(3.35e12, 989e12)),
    (("A100", "PCIE", "80GB"), Peaks(1.935e12, 312e12)),
    (("A100", "80GB"), Peaks(2.039e12, 312e12)),
    (("A100",), Peaks(1.555e12, 312e12)),
    (("L40S",), Peaks(0.864e12, 362e12)),
    (("A10G",), Peaks(0.6e12, 70e12)),
    (("L4",), Peaks(0.3e12, 121e12)),
)
"""By what NVML's name of the GPU contains, first match. Source: NVIDIA's data sheets of these products (of
A10G, the instance type's), 16-bit tensor arithmetic; where they state sparse figures, half of them."""


def peaks_of(name: str) -> Peaks | None:
    """Return the data-sheet rates of a GPU by NVML's name; None where it is not in the table."""
    words = name.upper().replace("-", " ").split()
    for parts, peaks in PEAKS:
        model, *variants = (part.upper() for part in parts)
        if model in words and all(any(v in word for word in words) for v in variants):
            return peaks
    return None


def gpu_sizes(gpu: Gpu) -> DeviceSizes:
    """Describe a GPU; the defaults are those of vLLM's API server (`engine/arg_utils.py`, 0.32)."""
    is_large = gpu.total_bytes >= 70 * GIB and "a100" not in gpu.name.lower()
    is_largest = gpu.total_bytes >= 160 * GIB
    peaks = peaks_of(gpu.name)
    return DeviceSizes(
        name=gpu.name,
        memory_bytes=float(gpu.total_bytes),
        max_num_seqs=1024 if is_large else 256,
        max_num_batched_tokens=16384 if is_largest else 8192 if is_large else 2048,
        bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s if peaks else None,
        compute_flops_per_s=peaks.compute_flops_per_s if peaks else None,
        has_fp8_arithmetic=gpu.compute_capability >= FP8_ARITHMETIC_CAPABILITY,
    )


def cpu_sizes(name: str, environment: Mapping[str, str]) -> DeviceSizes:
    """Describe a CPU: no rates, no graphs, and a KV cache of the size that the environment states."""
    try:
        space_gib: float | None = float(environment.get(CPU_KV_SPACE, ""))
    except ValueError:
        space_gib = None
    return DeviceSizes(
        name=name,
        memory_bytes=None,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        kv_bytes=space_gib * GIB if space_gib else None,
        has_graphs=False,
    )
