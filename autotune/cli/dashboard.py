"""`autotune dashboard`."""

from __future__ import annotations

import click

from autotune.cli.options import storage_option


@click.command("dashboard")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535),
              help="Port to listen on; 0 takes any free one.")  # fmt: skip
@storage_option
def command(host: str, port: int, storage: str) -> None:
    """Browse studies in optuna-dashboard, read-only.

    The dashboard has no passwords: keep it on loopback, and reach it from elsewhere through an SSH
    tunnel.
    """
    from autotune.report.dashboard import make_dashboard

    with make_dashboard(storage, host, port) as server:
        click.echo(f"http://{host}:{server.server_port}/dashboard (read-only; ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("stopped")
