#!/usr/bin/env bash
# English to Russian on Gemma-3-270m, a small model that does write Russian. It is under Google's terms, which this shows; it goes
# on with --accept-gemma-terms as its first argument, or where they were accepted before. What to expect: docs/adaptation.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo
if [ "${1:-}" = --accept-gemma-terms ]; then
  shift
  headwright terms gemma-3-270m --accept
else
  headwright terms gemma-3-270m
fi
exec bash "$root/scripts/adapt.sh" configs/gemma3-270m-eagle3.yaml configs/gemma3-270m-russian.yaml "$@"
