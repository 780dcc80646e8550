"""An engine of one's own: a formula says how fast it serves, and a virtual clock how long that takes."""

from pathlib import Path

from autotune.measure.records import Measurement, ServerCounters
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import VirtualClock
from autotune.serving.engine import Engine, LaunchReport, Server
from autotune.serving.models import DrafterInfo
from autotune.serving.virtual import answered, pass_time, play


def seconds_per_token(k):
    """10 ms a step and 1 ms a draft, of which 70 % survive each position."""
    return (0.010 + 0.001 * k) / sum(0.7**i for i in range(k + 1))


class FormulaEngine(Engine):
    def __init__(self, settings):
        self.clock = VirtualClock()

    def describe(self):
        return EngineInfo(
            "formula", "1", "simulated", "a formula", is_simulated=True, has_trees=False
        )

    def inspect(self, model, drafters, model_where, drafter_where):
        return None, tuple(DrafterInfo(d, Path(), "p-eagle", 8, 4, 32_000, 0, 0) for d in drafters)

    def launch(self, config, context):
        pass_time(self.clock, 60.0, context.should_stop, "launch")
        return FormulaServer(self.clock, config.num_speculative_tokens)


class FormulaServer(Server):
    def __init__(self, clock, k):
        self.clock, self.k = clock, k
        self.report = LaunchReport(launch_s=60.0)

    def warm_up(self, schedule, should_stop=None):
        pass_time(self.clock, 5.0, should_stop)

    def measure(self, schedule, on_record=None, should_stop=None):
        started_at_s = self.clock.now_s()
        records = answered(schedule, ttft_s=0.05, tpot_s=seconds_per_token(self.k))
        duration_s = max(record.finished_s for record in records)
        play(records, duration_s, self.clock, on_record, should_stop)
        return Measurement(
            schedule.digest, schedule.concurrency, started_at_s, duration_s, tuple(records),
            self.counters(), is_simulated=True,
        )  # fmt: skip

    def counters(self):
        return ServerCounters(has_speculation=self.k > 0)

    def close(self):
        pass
