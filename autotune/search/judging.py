"""The quality gate of a study: launches what it has to ask, and keeps its verdicts."""

from __future__ import annotations

from autotune.measure.quality.endpoint import EndpointFailed
from autotune.measure.quality.gate import Findings, Gate
from autotune.measure.quality.prompts import quality_prompts
from autotune.measure.quality.verdict import QualityLevel, QualityVerdict
from autotune.search.decision import BASELINE_ROLE
from autotune.search.launcher import Launcher
from autotune.search.setup import SearchSetup
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Server
from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure
from autotune.store.records import Phase

MAX_LAUNCHES_PER_VERDICT = 2


class Judge:
    """Judges configs against the one without speculation."""

    def __init__(self, setup: SearchSetup, launcher: Launcher) -> None:
        self._setup = setup
        self._launcher = launcher
        self._baseline: Findings | None = None
        """What the baseline answered; asked once a session."""

    def is_needed(self, config: ServingConfig) -> bool:
        """Whether a config could answer otherwise than the baseline, and can be asked here."""
        setup = self._setup
        return (
            setup.engine.can_be_asked
            and setup.profile.quality.gate != "off"
            and config.digest != setup.candidates.baseline.config.digest
        )

    def verdict(self, config: ServingConfig) -> QualityVerdict:
        """Launch the config and the baseline as far as needed, and judge the config's answers.

        Raises:
            MeasurementStopped: the search was stopped.
        """
        setup, settings = self._setup, self._setup.profile.quality
        baseline = setup.candidates.baseline.config
        prompts = quality_prompts(
            setup.confirm_schedule, settings.num_prompts, settings.max_tokens
        )
        is_lossy = (config.weights, config.kv_cache_dtype) != (
            baseline.weights,
            baseline.kv_cache_dtype,
        )
        gate = Gate(
            settings,
            prompts,
            setup.profile.offered_concurrency or 1,
            is_lossy=is_lossy,
            tasks=setup.quality_tasks,
            baseline=self._baseline,
        )
        while (side := gate.missing()) is not None:
            is_baseline = side == "baseline"

            def ask(server: Server, is_baseline: bool = is_baseline) -> None:
                endpoint = server.endpoint(setup.profile.endpoint)
                assert endpoint is not None  # the engine says that its servers can be asked
                visit = gate.visit_baseline if is_baseline else gate.visit_candidate
                try:
                    visit(endpoint, self._launcher.should_stop)
                except EndpointFailed as err:
                    failure = TrialFailure(
                        FailureKind.REQUEST_ERRORS, str(err), server.report.log_path
                    )
                    raise TrialFailed(failure) from err

            served = baseline if is_baseline else config
            roles = (BASELINE_ROLE,) if is_baseline else ()
            result = self._launcher.use(served, Phase.QUALITY, ask, roles)
            if result.failure is not None:
                # A config whose server cannot even answer plain questions is no good one. Where the
                # baseline's cannot, or where the gate asks for more than answers, nothing is known.
                is_to_blame = not is_baseline and not is_lossy
                return QualityVerdict(
                    QualityLevel.FAILED if is_to_blame else QualityLevel.NOT_CHECKED,
                    (f"the answers could not be collected: {result.failure}",),
                )
        self._baseline = gate.baseline
        return gate.verdict()
