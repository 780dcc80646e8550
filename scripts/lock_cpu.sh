#!/usr/bin/env bash
# Compile requirements/cpu.lock anew from requirements/cpu.in. Needs uv and an index with +cpu builds of torch;
# extra arguments go to uv, such as --find-links DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# torchvision, torchaudio and torchcodec are left out: the builds that get picked do not match the CPU
# build of torch, and every import of vLLM then dies with "operator torchvision::nms does not exist".
{
  echo "# Compiled from requirements/cpu.in by scripts/lock_cpu.sh. Install with: pip install --no-deps -r requirements/cpu.lock"
  uv pip compile --quiet requirements/cpu.in --universal --python-version 3.11 --no-annotate --no-header \
    --no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec "$@" \
    | grep -v -e '^-e ' -e "sys_platform == 'win32'"
} > requirements/cpu.lock.new
mv requirements/cpu.lock.new requirements/cpu.lock
