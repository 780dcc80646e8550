"""`vllm bench serve` as a process that does several runs, so that vLLM is imported once.

One JSON list of the command's own arguments a line on standard input; the command prints what it
always prints, to standard error. A line on standard output says that a run has ended.
"""

from __future__ import annotations

import contextlib
import json
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def serve() -> None:
    """Run until standard input closes."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            main(parser.parse_args(json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    print("ready", flush=True)
    serve()
