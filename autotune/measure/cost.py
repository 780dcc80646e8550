"""What tokens and solved tasks cost, from the user's own price; Autotune knows no prices."""

from __future__ import annotations

from dataclasses import replace

from autotune.measure.stats import Interval

SECONDS_PER_HOUR = 3600


def cost_interval_usd(
    rate: Interval, gpu_hourly_usd: float, gpus: int = 1, units: float = 1e6
) -> Interval | None:
    """Turn the interval of a rate into that of a cost: GPUs x $/h / (3600 x rate) x units.

    Cost falls as the rate rises, so the bounds change places.

    Args:
        rate: of tokens or tasks, per second. With `goodput_tps` it is the cost of tokens that keep
            every limit.
        gpu_hourly_usd: of one GPU.
        gpus: that serve.
        units: that are paid for: 10^6 tokens, or 1 task.

    Returns:
        None where the rate may be 0, and so the cost anything.
    """
    if rate.low <= 0 or rate.estimate <= 0:
        return None
    factor = gpus * gpu_hourly_usd / SECONDS_PER_HOUR * units
    return replace(
        rate,
        estimate=factor / rate.estimate,
        low=factor / rate.high,
        high=factor / rate.low,
    )


def cost_per_solved_task_usd(
    request_throughput_rps: Interval, solved_ratio: float, gpu_hourly_usd: float, gpus: int = 1
) -> Interval | None:
    """Return the cost of a request over the share of tasks that are solved, in US dollars.

    A request costs what one of the profile's traffic costs. The interval is that of the throughput:
    the share of solved tasks is taken as it was found.

    Returns:
        None where nothing was served or solved.
    """
    if solved_ratio <= 0:
        return None
    rate = request_throughput_rps
    solved = replace(
        rate,
        estimate=rate.estimate * solved_ratio,
        low=rate.low * solved_ratio,
        high=rate.high * solved_ratio,
    )
    return cost_interval_usd(solved, gpu_hourly_usd, gpus, units=1)
