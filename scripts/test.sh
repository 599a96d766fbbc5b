#!/usr/bin/env bash
# Set everything up, then lint, type check and the default tests. Arguments go to pytest: scripts/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo,dev
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" TOKENIZERS_PARALLELISM=false
ruff check .
ruff format --check .
mypy
# One thread per worker: OpenMP threads of two workers on two cores stall each other.
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 pytest --numprocesses "${WORKERS:-2}" --dist worksteal "$@"
