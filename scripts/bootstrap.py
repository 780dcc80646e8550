"""Sets up everything in `.venv` of this checkout, then runs the demo or the tests.

    python3 scripts/bootstrap.py demo [arguments of `autotune demo`]
    python3 scripts/bootstrap.py test [arguments of pytest]
    python3 scripts/bootstrap.py setup

Needs Python 3.11 or newer with pip, and nothing else. What is installed already is kept.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("AUTOTUNE_VENV", ROOT / ".venv"))
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements" / "cpu.lock"
STAMP = VENV / ".autotune-installed"
USAGE = "usage: python3 scripts/bootstrap.py demo|test|setup [arguments]"


def main() -> int:
    """Set up and run; return the exit code of what was run."""
    if sys.version_info < (3, 11):  # noqa: UP036  # this script runs on whatever python3 is there
        print("Autotune needs Python 3.11 or newer.", file=sys.stderr)
        return 2
    if len(sys.argv) < 2 or sys.argv[1] not in {"demo", "test", "setup"}:
        print(USAGE, file=sys.stderr)
        return 2
    set_up()
    what, arguments = sys.argv[1], sys.argv[2:]
    if what == "setup":
        return 0
    if what == "demo":
        return run([str(VENV / "bin" / "autotune"), "demo", *arguments])
    return run_tests(arguments)


def set_up() -> None:
    """Make the environment unless it is up to date with the lock file."""
    wanted = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    if not PYTHON.exists():
        print(f"making {VENV}", flush=True)
        venv.create(VENV, with_pip=True)
    print("installing the locked CPU environment (about 3 GB, some minutes)", flush=True)
    install_lock()
    pip("install", "--quiet", "--no-deps", "--editable", str(ROOT))
    STAMP.write_text(wanted)


def install_lock() -> None:
    """Install the lock file, with uv where pip finds no CPU build of PyTorch.

    CPU builds of PyTorch (`+cpu`) are not on the default package index. uv knows where they are.
    """
    arguments = ("install", "--quiet", "--no-deps", "--requirement", str(LOCK))
    if pip(*arguments, may_fail=True) == 0:
        return
    print("pip found no CPU build of PyTorch; trying uv, which knows where they are", flush=True)
    pip("install", "--quiet", "uv")
    command = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), "--no-deps",
               "--torch-backend", "cpu", "--requirement", str(LOCK)]  # fmt: skip
    if run(command) != 0:
        sys.exit(
            "error: the locked environment could not be installed. If PyTorch's CPU build is what is "
            "missing, add an index that has it to pip's configuration (extra-index-url) and repeat."
        )


def pip(*arguments: str, may_fail: bool = False) -> int:
    """Run the environment's pip; end the program when it fails, unless that is allowed."""
    code = run([str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments])
    if code and not may_fail:
        sys.exit(f"error: pip {arguments[0]} failed")
    return code


def run_tests(arguments: list[str]) -> int:
    """Run the linters and the tests; all of them, even when an early one fails."""
    if arguments:
        return run([str(PYTHON), "-m", "pytest", *arguments])
    steps = (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["pytest"],
    )
    codes = [run([str(PYTHON), "-m", *step]) for step in steps]
    return max(codes)


def run(command: list[str]) -> int:
    """Run a command in the checkout."""
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
