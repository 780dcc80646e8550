"""Which of the search's two models was right, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autotune.search.surrogate import OBJECTIVE


def models_text(environment: Mapping[str, Any]) -> list[str]:
    """Return lines on the models of a study: how far off each was, and what it found wrong.

    Args:
        environment: of a study.

    Returns:
        Nothing for a study whose sampler has no models, or that is too short to tell.
    """
    report = environment.get("models")
    if not report:
        return []
    errors = {
        name: of_model[OBJECTIVE]
        for name, of_model in report["leave_one_out"].items()
        if OBJECTIVE in of_model
    }
    lines = []
    if errors:
        ordered = sorted(errors, key=lambda name: errors[name])
        shares = ", ".join(f"{name} {math.expm1(errors[name]):.1%}" for name in ordered)
        verdict = f"; {ordered[0]} predicted better" if len(ordered) > 1 else ""
        lines.append(
            f"Models (leave-one-out error of the objective over {report['num_configs']} configs): "
            f"{shares}{verdict}"
        )
    lines += [f"Speculation of {finding}" for finding in report.get("findings", ())]
    return lines
