"""Short requests to a server on this machine: health, metrics, configuration."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

# A proxy set in the environment must not get between the tuner and loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request(
    url: str,
    *,
    body: dict[str, Any] | None = None,
    method: str | None = None,
    timeout_s: float = 10.0,
) -> tuple[int, str]:
    """Send one request and return status and text; status 0 means that nobody answered."""
    data = json.dumps(body).encode() if body is not None else None
    wanted = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with _OPENER.open(wanted, timeout=timeout_s) as response:
            return int(response.status), response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as err:
        return err.code, err.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as err:
        # HTTPException: the server died in the middle of its answer, or speaks something else.
        return 0, str(err)
