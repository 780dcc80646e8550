"""`result.json`: the evidence that goes with every export."""

from __future__ import annotations

import json
from typing import Any

from autotune.export.base import Deployment


def result_json(deployment: Deployment) -> str:
    """Write down what was decided, on what evidence, and what to expect of the deployment."""
    view = deployment.view
    row = next((r for r in view.rows if r.digest == deployment.config.digest), None)
    data: dict[str, Any] = {
        "format": "autotune-result",
        "version": 1,
        "study": view.record.name,
        "is_simulated": deployment.is_simulated,
        "picked_trial": deployment.trial_number,
        "config": deployment.config.as_dict(),
        "vllm_options": deployment.options,
        "expected": row.as_dict() if row is not None else None,
        "decision": view.decision.as_dict() if view.decision is not None else None,
        "configs": [r.as_dict() for r in view.rows],
        "definition": dict(view.record.definition),
        "environment": dict(view.record.environment),
        "launches": [
            {
                "launch_id": launch.launch_id,
                "phase": launch.phase.value,
                "repeat": launch.repeat,
                "config": launch.config.label(),
                "state": launch.state.value,
                "launch_s": launch.report.get("launch_s"),
                "num_requests": sum(len(m.records) for m in launch.measurements),
                "failure": str(launch.failure) if launch.failure is not None else None,
            }
            for launch in view.launches
        ],
    }
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
