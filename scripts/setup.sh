#!/usr/bin/env bash
# A virtual environment with the project of this checkout in it. Usage: source scripts/setup.sh EXTRAS (demo, or demo,dev).
# PYTHON chooses the interpreter, VENV the place (default .venv), TORCH_CPU the CPU build to ask for first.
set -euo pipefail
extras="$1"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${VENV:-$root/.venv}"

if [ ! -x "$venv/bin/python" ]; then
  python=""
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python="$candidate"
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "error: no Python 3.10 or later found; set PYTHON=/path/to/python3" >&2
    exit 2
  fi
  echo "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv" PIP_DISABLE_PIP_VERSION_CHECK=1

# Where there is no GPU, a CPU build of torch saves gigabytes: one that pip knows already, else the one that uv finds.
if ! python -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    pip install --quiet "torch>=2.6"
  else
    pip install --quiet "${TORCH_CPU:-torch==2.13.0+cpu}" 2>/dev/null ||
      { pip install --quiet uv && uv pip install --quiet --torch-backend cpu "torch>=2.6"; } ||
      pip install --quiet "torch>=2.6"
  fi
fi

# An editable install points at the tree that it was made from, so this checkout installs itself again whenever it changes.
stamp="$venv/.headwright-$(echo "$root $extras $(cat pyproject.toml configs/__init__.py)" | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  echo "installing headwright[$extras]"
  rm -f "$venv"/.headwright-*
  pip install --quiet --editable ".[$extras]"
  touch "$stamp"
fi
mkdir -p .typing/headwright
for folder in configs data heads eval train; do ln -sfn "../../$folder" ".typing/headwright/$folder"; done
