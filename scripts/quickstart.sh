#!/usr/bin/env bash
# From nothing to a trained, measured, exported EAGLE-3 head for a real model, on a plain CPU. Interrupted, it continues when
# called again. QUICK=1 does a small version in a few minutes. Further arguments override keys: scripts/quickstart.sh name=longer train.epochs=8
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" # deepspeed otherwise warns at every start that it found no GPU
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then unset DS_ACCELERATOR; fi

config=configs/smollm2-eagle3.yaml
if [ "${QUICK:-0}" = 1 ]; then
  config=configs/smollm2-eagle3-quick.yaml
fi
trap 'exit 130' INT TERM # a stage that is asked to stop saves and succeeds; the next one must not begin
for stage in harvest train eval export; do
  headwright "$stage" --config "$config" "$@"
done
headwright summary --config "$config" "$@"
