"""Bias of Autotune's load generator, and of `vllm bench serve`, against a server whose truth is known.

    python benchmarks/client

The mock (`tests/mock_server.py`) runs on one core, the client on another. It writes down when each request
arrives and when it really sends the answer's first and last chunk; what a client says that it measured is
compared with that. Both clients send Poisson arrivals at the same rates, in turn, several times. Prints a
table in markdown. Run it on an otherwise idle machine; it takes less than 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from client_sides import AutotuneClient, Client, Load, Told, VllmClient, warm_up
from server_side import Answer, Server, Truth

from autotune.demo.target import ensure_target

RATES = (100, 500, 1000, 2500, 5000)
"""Chunks per second."""
MIN_REQUESTS = 10


@dataclass(frozen=True)
class Row:
    """One run of one client."""

    client: str
    asked_chunks_per_s: float
    chunks_per_s: float
    ttft_bias_ratio: float
    tpot_bias_ratio: float
    ttft_bias_ms: float
    server_ttft_bias_ratio: float
    """What the mock did against what it was asked to do."""
    server_tpot_bias_ratio: float
    cpu_ratio: float
    audit: str


def main() -> None:
    """Compare the clients and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="CHUNKS_PER_S")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--duration-s", type=float, default=4.0, help="over which requests arrive")
    parser.add_argument("--tokenizer", type=Path, help="a folder; the demo's target when omitted")
    parser.add_argument("--without-vllm", action="store_true")
    parser.add_argument("--json", type=Path, help="write every run there as well")
    arguments = parser.parse_args()
    answer = Answer()
    rows: list[Row] = []
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        server = stack.enter_context(Server(answer, cores[0]))
        clients: list[Client] = [stack.enter_context(AutotuneClient(cores[-1]))]
        if not arguments.without_vllm:
            tokenizer = arguments.tokenizer or ensure_target()
            clients.append(stack.enter_context(VllmClient(cores[-1], tokenizer)))
        for client in clients:
            load = Load(20, 20.0, 0)
            warm_up(client, server.base_url, load)
            server.truth(load.num_requests)
        for row in measure(server, answer, clients, arguments):
            rows.append(row)
            print(f"{row.client:>18} {row.chunks_per_s:6.0f} chunks/s", file=sys.stderr)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(
    server: Server, answer: Answer, clients: Sequence[Client], arguments: argparse.Namespace
) -> Iterator[Row]:
    """Run every rate and repeat, the clients in turn."""
    for rate in arguments.rates:
        rps = rate / answer.num_chunks
        num_requests = max(MIN_REQUESTS, round(rps * arguments.duration_s))
        for repeat in range(arguments.repeats):
            order = clients if repeat % 2 == 0 else list(reversed(clients))
            for client in order:
                told = client.drive(Load(num_requests, rps, repeat), server.base_url)
                truth = server.truth(num_requests)
                yield row_of(client, rate, told, truth, answer)


def row_of(client: Client, rate: float, told: Told, truth: Truth, answer: Answer) -> Row:
    """Compare what was told with what was done."""
    return Row(
        client=client.name,
        asked_chunks_per_s=rate,
        chunks_per_s=truth.chunks_per_s,
        ttft_bias_ratio=told.ttft_ms / truth.ttft_ms - 1,
        tpot_bias_ratio=told.tpot_ms / truth.tpot_ms - 1,
        ttft_bias_ms=told.ttft_ms - truth.ttft_ms,
        server_ttft_bias_ratio=truth.ttft_ms / answer.ttft_ms - 1,
        server_tpot_bias_ratio=truth.tpot_ms / answer.tpot_ms - 1,
        cpu_ratio=client.cpu_ratio(truth),
        audit=told.audit,
    )


def table(rows: Sequence[Row]) -> str:
    """Lay out means over the repeats, with the lowest and the highest, as markdown."""
    lines = [
        "| chunks/s | client | TPOT bias, % | TTFT bias, % | TTFT bias, ms | CPU, % of a core | audit |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in sorted({row.asked_chunks_per_s for row in rows}):
        for name in dict.fromkeys(row.client for row in rows):
            of_both = [r for r in rows if (r.asked_chunks_per_s, r.client) == (rate, name)]
            cells = [
                f"{statistics.mean(r.chunks_per_s for r in of_both):.0f}",
                name,
                spread([r.tpot_bias_ratio * 100 for r in of_both], "+.3f"),
                spread([r.ttft_bias_ratio * 100 for r in of_both], "+.2f"),
                spread([r.ttft_bias_ms for r in of_both], "+.2f"),
                spread([r.cpu_ratio * 100 for r in of_both], ".1f"),
                ", ".join(dict.fromkeys(r.audit for r in of_both)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    ttft = [r.server_ttft_bias_ratio * 100 for r in rows]
    tpot = [r.server_tpot_bias_ratio * 100 for r in rows]
    lines += [
        "",
        f"The mock itself against what it was asked to do: TTFT {spread(ttft, '+.2f')} %, ",
    ]
    lines[-1] += f"TPOT {spread(tpot, '+.3f')} %."
    return "\n".join(lines)


def spread(values: Sequence[float], form: str) -> str:
    """Write a mean and its range."""
    mean = statistics.mean(values)
    return f"{mean:{form}} [{min(values):{form}}, {max(values):{form}}]"


if __name__ == "__main__":
    main()
