#!/usr/bin/env bash
# English to Russian, the mechanism only (SmolLM2 writes poor Russian): the quickstart's head on the Debian handbook. What to expect: docs/adaptation.md.
exec bash "$(dirname "${BASH_SOURCE[0]}")/adapt.sh" configs/smollm2-eagle3.yaml configs/smollm2-russian.yaml "$@"
