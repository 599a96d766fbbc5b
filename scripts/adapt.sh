#!/usr/bin/env bash
# A trained head taken to a domain: scripts/adapt.sh BASE CONFIG [section.key=value …]. BASE is the run file of the head that is
# adapted (harvested and trained first, where that has not been done), CONFIG that of the adaptation. The recipes' own scripts,
# adapt_python.sh and so on, call this. Interrupted, it continues when called again.
set -euo pipefail
base="$1" config="$2"
shift 2
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" # deepspeed otherwise warns at every start that it found no GPU
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then unset DS_ACCELERATOR; fi

trap 'exit 130' INT TERM # a stage that is asked to stop saves and succeeds; the next one must not begin
if [ ! -e "runs/$(basename "$base" .yaml)/training.json" ]; then # the head that is adapted
  headwright harvest --config "$base" --dry-run # terms that were not accepted are told before anything is fetched
  headwright harvest --config "$base"
  headwright train --config "$base"
fi
headwright adapt --config "$config" "$@"   # harvest, train, both heads in the same turns, report
headwright export --config "$config" "$@"
