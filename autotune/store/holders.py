"""Who holds something: a process, told apart from a later one that got its number."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """Describe this process, so that another one can tell later whether it still runs."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started_at_s": psutil.Process(pid).create_time(),
    }


def is_alive(holder: Mapping[str, Any]) -> bool:
    """Whether the holder still runs; one on another host cannot be asked and counts as alive.

    The start time tells the holder from a later process that got its number.
    """
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():
        return False
    try:
        process = psutil.Process(holder["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False  # ended, and only not yet reaped by whoever started it
        started = process.create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(abs(started - holder["started_at_s"]) < 2.0)
