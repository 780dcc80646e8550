"""optuna-dashboard on a study database, made read-only.

optuna-dashboard has no authentication, and answers a stranger's DELETE by deleting the study. So
nothing but reading gets through here, and only from pages that were opened under a name of this
machine: a page of another site that points its own name at 127.0.0.1 is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from autotune.errors import AutotuneError, PrerequisiteError
from autotune.search.ledger import DashboardStorage, optuna_storage
from autotune.store.schema import open_database

READ_METHODS = frozenset({"GET", "HEAD"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ReadOnly:
    """WSGI middleware that lets reading through, and only under known host names."""

    def __init__(self, app: WsgiApp, host_names: frozenset[str]) -> None:
        self._app = app
        self._host_names = host_names

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if _host_name(environ.get("HTTP_HOST", "")) not in self._host_names:
            return _refuse(start_response, "403 Forbidden", "unknown host name")
        if environ["REQUEST_METHOD"] not in READ_METHODS:
            return _refuse(
                start_response, "405 Method Not Allowed", "this dashboard is read-only",
                ("Allow", ", ".join(sorted(READ_METHODS))),
            )  # fmt: skip
        return self._app(environ, start_response)


def _host_name(header: str) -> str:
    """Cut the port off a Host header: ``localhost:8080`` and ``[::1]:8080``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


def _refuse(
    start_response: Callable[..., Any], status: str, why: str, *headers: tuple[str, str]
) -> list[bytes]:
    body = why.encode()
    start_response(
        status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), *headers]
    )
    return [body]


class DashboardServer(ThreadingMixIn, WSGIServer):
    """Serves several readers at once; a slow one does not hold up the others."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Say nothing: a page asks for data every few seconds."""


def make_dashboard(storage: str, host: str, port: int) -> DashboardServer:
    """Return a server for the dashboard; its `serve_forever` runs it.

    Args:
        storage: the study database, which must exist.
        host: address to listen on.
        port: 0 takes any free one; see the server's `server_port`.

    Raises:
        PrerequisiteError: optuna-dashboard is not installed.
        InputError: there is no such database.
        AutotuneError: the port is taken.
    """
    try:
        from optuna_dashboard import wsgi
    except ImportError as err:
        raise PrerequisiteError(
            'the dashboard needs optuna-dashboard: pip install "autotune[dashboard]".'
        ) from err
    open_database(storage, create=False).dispose()
    app = wsgi(optuna_storage(storage, DashboardStorage))
    try:
        server = DashboardServer((host, port), _QuietHandler)
    except OSError as err:
        raise AutotuneError(
            f"--port: {host}:{port} cannot be listened on ({err.strerror}). "
            "Give another port with --port, or stop what uses it."
        ) from err
    server.set_app(ReadOnly(app, LOOPBACK_NAMES | {host, socket.gethostname().lower()}))
    return server
