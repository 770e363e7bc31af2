#!/usr/bin/env bash
# Set-up, the demo model, and one MADPO run of two agents. Arguments are settings, e.g. run.seed=2.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
comlrl-ds demo-model models/smollm2-135m
exec comlrl-ds train launch/examples/quickstart.yaml "$@"
