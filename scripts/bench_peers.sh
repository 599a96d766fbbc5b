#!/usr/bin/env bash
# One virtual environment per peer under .peers/, for the benchmarks that run other toolkits' training steps beside ours.
# Usage: bash scripts/bench_peers.sh [specforge] [speculators] [modelopt]; without a name, these three. For scripts/foreign_heads
# also eagle, medusa, angelslim.
# PYTHON chooses the interpreter (3.11 or later), TORCH_CPU the build of torch to ask for first. Does nothing where all is in
# place. To run, SpecForge needs a C++ compiler besides (torch.compile).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

# The peers pin other versions of torch, or packages that a training step does not need: they come without dependencies
# (alone), and what they do need comes after (needs).
recipe() {
  case "$1" in
    specforge)
      alone="specforge==0.2.0 triton==3.9.0 yunchang"
      needs="transformers==5.8.1 accelerate datasets pydantic pyyaml psutil"
      loads="specforge.algorithms.eagle3.model" ;;
    speculators)
      alone="speculators==0.9.0 hs-connectors==0.9.0 triton==3.9.0"
      needs="transformers==5.19.0 datasets<=5.1.0 pydantic pydantic-settings loguru openai"
      loads="speculators.models.eagle3" ;;
    modelopt)
      alone="nvidia-modelopt==0.47.0"
      needs="transformers>=4.57,<5.15 omegaconf pulp<4 requests scipy"
      loads="modelopt.torch.speculative" ;;
    eagle)
      alone="eagle-llm==1.2.1"
      needs="transformers==4.53.1 accelerate"
      loads="transformers" ;;
    medusa)
      alone="medusa-llm==0.1"
      needs="transformers==4.53.1"
      loads="transformers" ;;
    angelslim)
      alone="angelslim==0.5.0"
      needs="transformers>=5.2,<5.15 accelerate datasets"
      loads="transformers" ;;
    *) return 1 ;;
  esac
}

# Everything that one peer needs; the first step that fails ends it.
install() {
  local python=".peers/$1/bin/python"
  "${PYTHON:-python3}" -m venv --clear ".peers/$1" &&
    { "$python" -m pip install --quiet "${TORCH_CPU:-torch==2.13.0+cpu}" 2>/dev/null ||
      "$python" -m pip install --quiet torch==2.13.0; } &&
    "$python" -m pip install --quiet --no-deps $alone &&
    "$python" -m pip install --quiet $needs &&
    "$python" -c "import $loads"
}

ready="" failed=""
for name in "${@:-specforge speculators modelopt}"; do
  for peer in $name; do
    if ! recipe "$peer"; then
      echo "no peer is called $peer: specforge, speculators, modelopt, eagle, medusa, angelslim" >&2
      failed+=" $peer"
      continue
    fi
    stamp=".peers/$peer/.ready-$(echo "$alone $needs" | cksum | cut -d' ' -f1)"
    if [ ! -e "$stamp" ]; then
      echo "installing $peer: $alone, and $needs"
      mkdir -p .peers
      if install "$peer" >".peers/$peer.log" 2>&1; then
        touch "$stamp"
      else
        echo "$peer cannot be installed; the end of .peers/$peer.log:" >&2
        tail -5 ".peers/$peer.log" >&2
        failed+=" $peer"
        continue
      fi
    fi
    ready+=" $peer"
  done
done
echo "ready:${ready:- none}${failed:+; not ready:$failed}"
[ -n "$ready" ]
