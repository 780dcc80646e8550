"""The decode step that is timed on GPUs does the right arithmetic: checked on CPU, in small."""

from __future__ import annotations

import io
import json
import math

import pytest

torch = pytest.importorskip("torch")

from benchmarks.step_time import TINY, Model, rms_norm, rows, write  # noqa: E402  # needs torch

CONTEXT = 5


def make_model() -> Model:
    return Model(TINY, 2, 3, CONTEXT + 4, "cpu", torch.float64, is_fp8=False)


def test_several_tokens_in_a_step_give_the_logits_of_one_by_one() -> None:
    """What verification relies on; wrong masks, positions or cache rows would show."""
    tokens = torch.randint(TINY.vocab, (3, 4), generator=torch.Generator().manual_seed(1))
    together = make_model().step(tokens, CONTEXT)
    model = make_model()
    single = torch.cat([model.step(tokens[:, i : i + 1], CONTEXT + i) for i in range(4)], dim=1)
    torch.testing.assert_close(together, single)


def test_one_layer_against_plain_loops() -> None:
    """Attention of one new token with explicit sums: each pair of query heads shares a KV head."""
    model = Model(TINY, 1, 1, CONTEXT + 1, "cpu", torch.float64, is_fp8=False)
    layer, tokens = model.layers[0], torch.tensor([[7]])
    logits = model.step(tokens, CONTEXT)[0, 0]

    x = model.embedding[7]
    y = x / math.sqrt(float((x**2).mean()) + 1e-6)
    q = layer.qkv(y[None])[0, : TINY.num_heads * TINY.head_size].reshape(TINY.num_heads, -1)
    half = TINY.head_size // 2
    out = []
    for head in range(TINY.num_heads):
        turned = torch.empty_like(q[head])
        for i in range(half):
            angle = CONTEXT * 10_000.0 ** (-2 * i / TINY.head_size)
            a, b = q[head, i], q[head, i + half]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + half] = a * math.sin(angle) + b * math.cos(angle)
        of_group = head // (TINY.num_heads // TINY.num_kv_heads)
        keys, values = layer.keys[0, of_group], layer.values[0, of_group]
        weights = [math.exp(float(turned @ key) / math.sqrt(TINY.head_size)) for key in keys]
        out.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    x = x + layer.out(torch.cat(out)[None])[0]
    z = x / math.sqrt(float((x**2).mean()) + 1e-6)
    gate, up = layer.gate_up(z[None])[0].chunk(2)
    x = x + layer.down((gate / (1 + torch.exp(-gate)) * up)[None])[0]
    z = x / math.sqrt(float((x**2).mean()) + 1e-6)
    # Angles are computed in 32 bits.
    torch.testing.assert_close(logits, model.head(z[None])[0], rtol=1e-4, atol=1e-5)


def test_the_norm_makes_the_mean_square_one() -> None:
    x = torch.tensor([[3.0, 4.0]])
    expected = x / math.sqrt(12.5)
    torch.testing.assert_close(rms_norm(x, torch.ones(2)), expected, rtol=1e-5, atol=1e-5)


def test_rows_are_json_and_extrapolate_to_all_layers() -> None:
    out = io.StringIO()
    with torch.inference_mode():
        assert write(rows(TINY, "cpu", (1, 2), (0, 1), 8, 3), out) == 2 * 2 * 2
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    for row in found:
        assert row["device"] == "cpu"
        assert row["torch"] == torch.__version__
        assert 0 < row["low_ms"] <= row["median_ms"] <= row["high_ms"]
    shallow, deep = (
        next(
            r for r in found if (r["batch"], r["num_speculative_tokens"], r["layers"]) == (2, 1, n)
        )
        for n in TINY.timed_layers
    )
    assert shallow["full_depth_ms"] is None
    # Layers 1 and 2 were run of 4: two more at the difference between them.
    slope_ms = deep["median_ms"] - shallow["median_ms"]
    assert deep["full_depth_ms"] == pytest.approx(deep["median_ms"] + 2 * slope_ms)
