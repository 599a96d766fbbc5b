#!/usr/bin/env bash
# SGLang's own loader, classes and EAGLE worker on our exports: every tensor is filled, and it drafts what our reader drafts.
# Usage: bash scripts/verify_sglang.sh                        heads of every kind that it serves
#        bash scripts/verify_sglang.sh --config FILE [key=…]  the exports of a run of yours, on its held-out prompts
# Its Python side comes into .engines/sglang, for a CPU; a server is not started. PYTHON chooses the interpreter (3.10 or later),
# TORCH_CPU the build of torch to ask for first, SGLANG_VERSION the release. What is installed already is not installed again.
# INSTALL_SECONDS (1200) bounds that. Exit code 75: SGLang cannot be installed here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

# SGLang wants a CUDA build of torch and tens of packages of kernels; its loader, models and EAGLE worker import without them.
export alone="sglang==${SGLANG_VERSION:-0.5.23} triton==3.9.0 apache-tvm-ffi==0.1.11"
export needs="transformers==5.19.0 openai==2.8.0 compressed-tensors==0.18.0 sentencepiece==0.2.1 aiohttp dill einops fastapi gguf
  ipython loguru msgspec orjson partial_json_parser pillow psutil pybase64 pyzmq requests setproctitle uvicorn"

# The first step that fails ends it.
install() {
  "${PYTHON:-python3}" -m venv --clear "$venv" &&
    { "$venv/bin/python" -m pip install --quiet "${TORCH_CPU:-torch==2.13.0+cpu}" ||
      "$venv/bin/python" -m pip install --quiet torch==2.13.0; } &&
    "$venv/bin/python" -m pip install --quiet $needs &&
    "$venv/bin/python" -m pip install --quiet --no-deps $alone &&
    echo '{"heads": [], "context_length": 8, "dtype": "auto"}' | "$venv/bin/python" eval/sglang_side.py
}

engine=sglang packages="$alone $needs"
source scripts/verify_engine.sh
