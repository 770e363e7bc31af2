#!/usr/bin/env bash
# Set-up and all tests: lint, types, unit, launcher and end-to-end tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PATH="$PWD/.venv/bin:$PATH"
ruff check comlrl_ds tests launch
ruff format --check --quiet comlrl_ds tests || { echo "run: ruff format comlrl_ds tests" >&2; exit 1; }
mypy --no-error-summary
exec python -m pytest -rs "$@"  # -rs: why a test was skipped
