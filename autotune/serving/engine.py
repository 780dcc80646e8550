"""The contract between the search and whatever serves: real vLLM, a simulation, a recording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.closing import Closing
from autotune.measure.client import OnRecord, ShouldStop
from autotune.measure.quality.endpoint import Endpoint, EndpointKind
from autotune.measure.records import Measurement, ServerCounters
from autotune.serving.capabilities import EngineInfo
from autotune.serving.clock import Clock
from autotune.serving.config import ServingConfig
from autotune.serving.models import (
    DrafterInfo,
    ModelInfo,
    check_pair,
    inspect_drafter,
    inspect_model,
)
from autotune.serving.sizes import ServingSizes
from autotune.serving.vllm_options import Needs
from autotune.traffic.schedule import Schedule


@dataclass(frozen=True)
class LaunchContext:
    """What a launch needs beside the config."""

    work_dir: Path
    """Where logs go; exists."""
    name: str
    """Unique among the launches of a study; used in file names."""
    needs: Needs = field(default_factory=Needs)
    timeout_s: float = 900.0
    should_stop: ShouldStop | None = None
    """Asked at least once a second while waiting; True gives the launch up."""


@dataclass(frozen=True)
class LaunchReport:
    """What is worth keeping about a launch that succeeded."""

    launch_s: float
    """Seconds from the start of the process until it was healthy."""
    argv: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """The same as a mapping of vLLM's options, the derived ones included."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that were set for the server, beside the inherited ones."""
    log_path: str | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """The server's own word on its configuration, where it gives one."""


class Server(Closing):
    """A launched server. It belongs to the thread that launched it.

    Leaving the context, or `close`, frees everything the launch started, whatever happened before;
    afterwards no process of it is left and the device's memory is back. `close` may be called twice.
    """

    report: LaunchReport

    @abstractmethod
    def warm_up(self, schedule: Schedule, should_stop: ShouldStop | None = None) -> None:
        """Send the schedule's warm-up requests and throw their results away.

        Raises:
            TrialFailed: the server failed, or refused every request.
        """

    @abstractmethod
    def measure(
        self,
        schedule: Schedule,
        on_record: OnRecord | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Measurement:
        """Send the schedule and return what was seen. May be called several times per launch.

        Args:
            schedule: what to send; equal schedules are sent equally.
            on_record: called with each request's record as it finishes.
            should_stop: True ends the measurement early.

        Raises:
            TrialFailed: the server died, or too much went wrong for a measurement.
            MeasurementStopped: `should_stop` said so; the server can only be closed then.
        """

    @abstractmethod
    def counters(self) -> ServerCounters:
        """Return the server's counters since its start."""

    def endpoint(self, kind: EndpointKind) -> Endpoint | None:
        """Return where questions can be put to it, None where nothing answers them."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop the server and everything it started."""


class Engine(ABC):
    """Something that can serve configs. One launch at a time unless the engine says otherwise.

    An engine of another package joins through the entry point group ``autotune.engines``: a name
    that leads to a subclass whose constructor takes one `EngineSettings`.
    """

    clock: Clock
    can_be_asked = False
    """Whether its servers have an endpoint that answers, as the quality gate needs."""

    @abstractmethod
    def describe(self) -> EngineInfo:
        """Say what it is and on what hardware, without launching anything.

        Raises:
            PrerequisiteError: it cannot run here; the message says what to install.
        """

    def inspect(
        self, model: str, drafters: Sequence[str], model_where: str, drafter_where: str
    ) -> tuple[ModelInfo | None, tuple[DrafterInfo, ...]]:
        """Return the facts about a target and its drafters, and refuse heads that do not fit.

        Args:
            model: folder or hub id of the target.
            drafters: folders or hub ids of the heads.
            model_where: the file or option the target's name comes from, for messages.
            drafter_where: the same of the drafters' names.

        Returns:
            The target, None where the engine needs none, and the heads in the order given.

        Raises:
            InputError: one of them cannot be used.
            PrerequisiteError: one of them has to be downloaded first.
        """
        target = inspect_model(model, model_where)
        heads = tuple(inspect_drafter(drafter, drafter_where) for drafter in drafters)
        for head in heads:
            check_pair(target, head)
        return target, heads

    def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes | None:
        """Return the sizes that memory and cost arithmetic need; None where they are not known.

        Without them nothing is pruned for memory, and the search uses samplers that know no physics.

        Args:
            model: the target as `ServingConfig.model` names it.
            drafters: the heads that `inspect` returned.
        """
        return None

    @abstractmethod
    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        """Start a server for `config` and return it healthy and verified: it runs what was asked.

        Raises:
            TrialFailed: it did not come up; nothing of it is left running.
            MeasurementStopped: `context.should_stop` said so; nothing of it is left running.
        """


@dataclass(frozen=True)
class EngineSettings:
    """What the user said about the engine."""

    python: Path | None = None
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine-specific settings, such as the simulated GPU's name or a recording's path."""
    cache_dir: Path | None = None
    seed: int = 0
