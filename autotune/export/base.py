"""The contract of an export target, and writing its files all at once."""

from __future__ import annotations

import errno
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InputError, StudyError, invalid, suggestion
from autotune.report.study import StudyView
from autotune.serving.capabilities import Device
from autotune.serving.config import ServingConfig
from autotune.serving.vllm_options import VllmOptions
from autotune.store.records import LaunchRecord, LaunchState


@dataclass(frozen=True)
class Deployment:
    """What is to be deployed, and where it comes from."""

    config: ServingConfig
    options: VllmOptions
    """All of vLLM's options as they were measured; host, port and served name are not among them."""
    environment: Mapping[str, str]
    """Variables that the server needs; no secrets."""
    engine: Mapping[str, Any]
    """Version and hardware that were measured."""
    trial_number: int | None
    """Set when the user picked a trial instead of taking the decision."""
    view: StudyView

    @property
    def device(self) -> Device:
        device: Device = self.engine["device"]
        return device

    @property
    def is_simulated(self) -> bool:
        return self.view.record.is_simulated

    def remarks(self) -> list[str]:
        """What every file of an export must say about its origin."""
        view = self.view
        lines = [f"study {view.record.name}, config {self.config.label()} ({self.config.digest})"]
        lines.append(f"measured with {self.engine['engine']} {self.engine['version']} on "
                     f"{self.engine['hardware']}")  # fmt: skip
        if view.record.source_mark:
            lines.append(
                f"{view.record.source_mark.upper()}: no server was measured for this study"
            )
        if self.trial_number is not None:
            lines.append(
                f"picked by hand (trial {self.trial_number}): not what a decision recommends"
            )
        elif view.decision is not None:
            lines += [f"note: {warning}" for warning in view.decision.warnings]
        return lines


class Exporter(ABC):
    """One deployment target. Rendering is pure: the same deployment gives the same files."""

    name: str

    @abstractmethod
    def render(self, deployment: Deployment) -> dict[str, str]:
        """Return the files by name.

        Raises:
            InputError: the target cannot express the config; the message names every key.
        """

    @abstractmethod
    def validate(self, files: Mapping[str, str]) -> list[str]:
        """Check rendered files against the target's own rules; return what is wrong."""

    @property
    def executables(self) -> frozenset[str]:
        """Names of the files that must be executable."""
        return frozenset()


def exporters() -> dict[str, Exporter]:
    """Return all targets by name."""
    from autotune.export.vllm import VllmExporter

    return {exporter.name: exporter for exporter in (VllmExporter(),)}


def export_study(
    view: StudyView, target: str, out: Path, trial_number: int | None = None
) -> list[Path]:
    """Write the files that deploy a study's decision, or one of its trials.

    Args:
        view: the study.
        target: name of the target.
        out: folder to write into; made if missing. Nothing half-written is left on an error.
        trial_number: deploy this trial instead of the decision.

    Returns:
        The files written.

    Raises:
        InputError: unknown target or trial, or `out` cannot be written to.
        StudyError: the study has no decision.
    """
    known = exporters()
    if target not in known:
        raise invalid("must be a known target", where="--to", got=target,
                      next_step=suggestion(target, known))  # fmt: skip
    deployment = make_deployment(view, trial_number)
    exporter = known[target]
    files = exporter.render(deployment)
    problems = exporter.validate(files)
    if problems:
        raise StudyError(f"the files for {target} would not work: " + "; ".join(problems))
    return write_files(files, out, exporter.executables)


def make_deployment(view: StudyView, trial_number: int | None) -> Deployment:
    """Collect what an exporter needs from a study.

    Raises:
        InputError: there is no such trial, or it has no measurement.
        StudyError: the study has no decision and no trial was picked.
    """
    launch = _launch_of(view, trial_number)
    options = _measured_options(launch) or _options_from_config(launch)
    return Deployment(
        config=launch.config,
        options=options,
        environment=_lasting(launch.report.get("environment", {})),
        engine=view.record.environment["engine"],
        trial_number=trial_number,
        view=view,
    )


def _launch_of(view: StudyView, trial_number: int | None) -> LaunchRecord:
    measured = [x for x in view.launches if x.state is LaunchState.MEASURED]
    if trial_number is not None:
        found = [x for x in measured if x.trial_number == trial_number]
        if not found:
            numbers = sorted({x.trial_number for x in measured if x.trial_number is not None})
            raise invalid("must be a measured trial", where="--trial", got=trial_number,
                          next_step=f"Measured: {', '.join(map(str, numbers)) or 'none'}.")  # fmt: skip
        return found[-1]
    if view.decision is None:
        raise StudyError(
            f"study {view.record.name!r} has no decision yet. Run its search to the end, or pick a "
            "trial yourself: --trial N (see `autotune show`)."
        )
    return [x for x in measured if x.config.digest == view.decision.winner][-1]


_ONLY_FOR_MEASURING = {"VLLM_SERVER_DEV_MODE", "VLLM_CACHE_ROOT", "HF_HUB_OFFLINE"}


def _measured_options(launch: LaunchRecord) -> VllmOptions:
    """Take the options as the measured server got them, kept with its launch."""
    return dict(launch.report.get("options") or {})


def _options_from_config(launch: LaunchRecord) -> VllmOptions:
    """Derive the options of a launch that no server was started for (simulated, replayed)."""
    from autotune.serving.vllm_options import Needs, vllm_options

    return vllm_options(launch.config, Needs(), "cpu")


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that served the measuring alone, and secrets."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _ONLY_FOR_MEASURING and value != "***"
    }


def write_files(files: Mapping[str, str], out: Path, executables: frozenset[str]) -> list[Path]:
    """Write all files or none: they are made aside and moved in at the end.

    Where the last step fails half-way, what was there before is put back.

    Raises:
        InputError: the folder cannot be written to, or the disk is full.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".autotune-", dir=out))
    except OSError as err:
        raise _cannot_write(out, err) from err
    try:
        for name, text in files.items():
            path = scratch / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in executables else 0o644)
        _move_in(list(files), scratch, out)
    except OSError as err:
        raise _cannot_write(out, err) from err
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [out / name for name in files]


def _move_in(names: list[str], scratch: Path, out: Path) -> None:
    """Move finished files into place, and undo it all when one of them cannot be."""
    before = scratch / "before"
    before.mkdir()
    moved: list[str] = []
    try:
        for name in names:
            if (out / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{name} is a folder", str(out / name))
            if (out / name).exists():
                (out / name).rename(before / name)
            moved.append(name)
            (scratch / name).replace(out / name)
    except OSError:
        for name in moved:
            (out / name).unlink(missing_ok=True)
            if (before / name).exists():
                (before / name).rename(out / name)
        raise


def _cannot_write(out: Path, err: OSError) -> InputError:
    return InputError(
        f"--out: {out} cannot be written to ({err.strerror}). Give another folder, or make space "
        "or rights there."
    )
