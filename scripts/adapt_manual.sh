#!/usr/bin/env bash
# A technical manual: the quickstart's head on pages of CMake's documentation. What to expect: docs/adaptation.md.
exec bash "$(dirname "${BASH_SOURCE[0]}")/adapt.sh" configs/smollm2-eagle3.yaml configs/smollm2-manual.yaml "$@"
