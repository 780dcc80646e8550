"""How long does a decode step of B x (K + 1) tokens take? A Llama-like step in plain torch, timed.

    python benchmarks/step_time.py --out step-time.jsonl           # a GPU, under 8 minutes
    python benchmarks/step_time.py --device cpu --tiny             # correctness only

Layers of an 8B model (hidden 4096, 32 heads of 128, 8 KV heads, MLP 14336, vocabulary 128,256), a few of
them: the time of all is that of one step with LM head, plus the missing layers at the slope between two
depths. Each row says B, K, type of the weights, whether a CUDA graph was replayed, and the median over
repeats. The simulated worlds' step times are meant to be compared in shape with such rows, not in size:
vLLM's kernels, scheduler and sampler are not in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
DEPTHS = (0, 1, 3, 7, 15)
CONTEXT_TOKENS = 1024
NUM_REPEATS = 15
NUM_WARMUPS = 3
TIME_LIMIT_S = 450.0
MAX_E4M3 = 448.0
"""Largest value of torch.float8_e4m3fn."""
MIN_FP8_ROWS = 16
"""torch._scaled_mm wants dimensions in multiples of 16; fewer rows are padded."""


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions."""

    hidden: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    mlp: int = 14336
    vocab: int = 128_256
    num_layers: int = 32
    timed_layers: tuple[int, int] = (2, 6)
    """The two depths that are really run."""


TINY = Shape(
    hidden=64, num_heads=4, num_kv_heads=2, head_size=16, mlp=128, vocab=96, num_layers=4,
    timed_layers=(1, 2),
)  # fmt: skip


class Linear:
    """A matrix without bias, in the model's type or in FP8 with one scale per matrix."""

    def __init__(self, weight: Tensor, *, is_fp8: bool) -> None:
        """Take a weight of shape (out, in)."""
        self._weight, self._is_fp8 = weight, is_fp8
        self._scale = torch.ones((), device=weight.device)
        if is_fp8:
            self._scale = (weight.abs().max().float() / MAX_E4M3).clamp(min=1e-12)
            self._weight = (weight.float() / self._scale).to(torch.float8_e4m3fn)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows: (n, in) to (n, out)."""
        if not self._is_fp8:
            return F.linear(x, self._weight)
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % MIN_FP8_ROWS))
        scale = (padded.abs().max().float() / MAX_E4M3).clamp(min=1e-12)
        y = torch._scaled_mm(
            (padded.float() / scale).to(torch.float8_e4m3fn),
            self._weight.t(),
            scale_a=scale,
            scale_b=self._scale,
            out_dtype=x.dtype,
        )
        return y[:rows]


class Layer:
    """Weights and KV cache of one decoder layer."""

    def __init__(
        self,
        shape: Shape,
        batch: int,
        capacity: int,
        make: Callable[..., Tensor],
        *,
        is_fp8: bool,
    ) -> None:
        """Make random weights and a random cache of `capacity` tokens for each of `batch` requests."""
        q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.qkv = Linear(make(q + 2 * kv, shape.hidden), is_fp8=is_fp8)
        self.out = Linear(make(shape.hidden, q), is_fp8=is_fp8)
        self.gate_up = Linear(make(2 * shape.mlp, shape.hidden), is_fp8=is_fp8)
        self.down = Linear(make(shape.hidden, shape.mlp), is_fp8=is_fp8)
        self.norms = [torch.ones_like(make(shape.hidden)) for _ in range(2)]
        self.keys = make(batch, shape.num_kv_heads, capacity, shape.head_size)
        self.values = make(batch, shape.num_kv_heads, capacity, shape.head_size)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Divide by the root of the mean square, computed in 32 bits."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotate pairs of (batch, heads, n, head size) by their positions from `start` on (RoPE)."""
    n, size = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(start, start + n, device=x.device)[:, None] * rates
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model:
    """A decoder that verifies n new tokens of each request in one step."""

    def __init__(
        self,
        shape: Shape,
        num_layers: int,
        batch: int,
        capacity: int,
        device: str,
        dtype: torch.dtype,
        *,
        is_fp8: bool,
        seed: int = 0,
    ) -> None:
        """Make everything random from `seed`."""
        generator = torch.Generator(device).manual_seed(seed)

        def make(*size: int) -> Tensor:
            values = torch.randn(*size, generator=generator, device=device, dtype=dtype)
            return values * size[-1] ** -0.5

        self.shape = shape
        self.embedding = make(shape.vocab, shape.hidden) * shape.hidden**0.5
        self.layers = [
            Layer(shape, batch, capacity, make, is_fp8=is_fp8) for _ in range(num_layers)
        ]
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.head = Linear(make(shape.vocab, shape.hidden), is_fp8=False)

    def step(self, tokens: Tensor, context: int) -> Tensor:
        """Run (batch, n) tokens behind `context` cached ones; return logits (batch, n, vocabulary).

        Their keys and values are written into the cache. Each token sees the context, itself and the new
        tokens before it.
        """
        batch, n = tokens.shape
        x = self.embedding[tokens].reshape(batch * n, -1)
        mask = None
        if n > 1:
            mask = torch.ones(n, context + n, dtype=torch.bool, device=x.device).tril(context)
        for layer in self.layers:
            x = x + self._attention(layer, rms_norm(x, layer.norms[0]), batch, n, context, mask)
            gate, up = layer.gate_up(rms_norm(x, layer.norms[1])).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return self.head(rms_norm(x, self.norm)).reshape(batch, n, -1)

    def _attention(
        self, layer: Layer, x: Tensor, batch: int, n: int, context: int, mask: Tensor | None
    ) -> Tensor:
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        q, k, v = (
            part.reshape(batch, n, -1, shape.head_size).transpose(1, 2)
            for part in layer.qkv(x).split([q_size, kv_size, kv_size], dim=-1)
        )
        end = context + n
        layer.keys[:, :, context:end] = rotate(k, context)
        layer.values[:, :, context:end] = v
        y = F.scaled_dot_product_attention(
            rotate(q, context),
            layer.keys[:, :, :end],
            layer.values[:, :, :end],
            attn_mask=mask,
            enable_gqa=True,
        )
        return layer.out(y.transpose(1, 2).reshape(batch * n, q_size))


@dataclass(frozen=True)
class Row:
    """One timing."""

    device: str
    torch: str
    weights: str
    has_graph: bool
    batch: int
    num_speculative_tokens: int
    context_tokens: int
    layers: int
    """That were run."""
    num_repeats: int
    median_ms: float
    low_ms: float
    high_ms: float
    """Quartiles of the repeats."""
    full_depth_ms: float | None
    """Of all layers, extrapolated; None in the row of the shallower run."""


def time_steps(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Return milliseconds of each repeat, after warm-ups."""
    for _ in range(NUM_WARMUPS):
        run()
    times = []
    for _ in range(repeats):
        _wait(device)
        began_s = time.perf_counter()
        run()
        _wait(device)
        times.append((time.perf_counter() - began_s) * 1e3)
    return times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `run` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def has_fp8(device: str) -> bool:
    """Whether the device multiplies in FP8: compute capability 8.9 or higher."""
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def rows(
    shape: Shape,
    device: str,
    batches: tuple[int, ...],
    depths: tuple[int, ...],
    context: int,
    repeats: int,
) -> Iterator[Row]:
    """Time every combination, until the time limit."""
    began_s = time.monotonic()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain = str(dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    for is_fp8 in (False, True) if has_fp8(device) else (False,):
        for batch in batches:
            by_point: dict[tuple[int, bool], float] = {}
            for num_layers in shape.timed_layers:
                capacity = context + max(depths) + 1
                model = Model(shape, num_layers, batch, capacity, device, dtype, is_fp8=is_fp8)
                for k in depths:
                    tokens = torch.randint(shape.vocab, (batch, k + 1), device=device)

                    def run(model: Model = model, tokens: Tensor = tokens) -> Tensor:
                        return model.step(tokens, context)

                    for has_graph in (False, True) if device == "cuda" else (False,):
                        if time.monotonic() - began_s > TIME_LIMIT_S:
                            return
                        times = time_steps(captured(run) if has_graph else run, device, repeats)
                        low, middle, high = statistics.quantiles(times, n=4)
                        full = None
                        if num_layers == shape.timed_layers[0]:
                            by_point[k, has_graph] = middle
                        else:
                            shallow, deep = shape.timed_layers
                            slope = (middle - by_point[k, has_graph]) / (deep - shallow)
                            full = middle + (shape.num_layers - deep) * slope
                        yield Row(
                            name, torch.__version__, "fp8" if is_fp8 else plain, has_graph, batch,
                            k, context, num_layers, repeats, middle, low, high, full,
                        )  # fmt: skip


def write(found: Iterator[Row], out: TextIO) -> int:
    """Write each row as a line of JSON, as soon as it is there, and return how many there were."""
    count = 0
    for row in found:
        out.write(json.dumps(asdict(row)) + "\n")
        out.flush()
        count += 1
    return count


def main() -> int:
    """Time the steps and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, few points: correctness")
    parser.add_argument("--context", type=int, default=CONTEXT_TOKENS, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS, metavar="N", help="at least 2")
    parser.add_argument("--out", type=Path, help="JSON lines; standard output when omitted")
    arguments = parser.parse_args()
    if arguments.context < 1 or arguments.repeats < 2:
        parser.error("--context must be at least 1 and --repeats at least 2")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no GPU that torch can use; --device cpu --tiny checks the arithmetic"
        )
    batches: tuple[int, ...] = BATCH_SIZES
    depths: tuple[int, ...] = DEPTHS
    shape = Shape()
    if arguments.tiny:
        batches, depths, shape = (1, 3), (0, 3), TINY
    context = min(arguments.context, 32) if arguments.tiny else arguments.context
    with torch.inference_mode():
        found = rows(shape, arguments.device, batches, depths, context, arguments.repeats)
        if arguments.out is None:
            write(found, sys.stdout)
        else:
            with arguments.out.open("w", encoding="utf-8") as out:
                print(f"{write(found, out)} rows in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
