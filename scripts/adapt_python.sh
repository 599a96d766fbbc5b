#!/usr/bin/env bash
# Code completion: the quickstart's head on Python's standard library. What to expect: docs/adaptation.md.
exec bash "$(dirname "${BASH_SOURCE[0]}")/adapt.sh" configs/smollm2-eagle3.yaml configs/smollm2-python.yaml "$@"
