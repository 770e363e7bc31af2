#!/usr/bin/env bash
# Trains on N ranks of this machine: one per GPU, or N processes that share the CPU.
#
#   launch/local.sh 3 run.yaml run.seed=2    # words after the run file are settings
#
#   MASTER_PORT  port at which the ranks meet (default: a free one)
set -euo pipefail
usage="usage: launch/local.sh N run.yaml [path.to.setting=value ...]"
fail() { echo "local: $*" >&2; exit 2; }
[ $# -ge 2 ] || fail "$usage"
[[ $1 =~ ^[1-9][0-9]*$ ]] || fail "'$1' is no number of ranks; $usage"
[ -f "$2" ] || fail "there is no run file '$2'; $usage"
ranks=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
"$root/launch/setup.sh"
export PATH="$root/.venv/bin:$PATH"

port=${MASTER_PORT:-$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
[[ $port =~ ^[0-9]+$ ]] || fail "MASTER_PORT '$port' is not a number"
has_gpu() {
    case "${COMLRL_DS_DEVICE:-}" in cpu) false ;; gpu) true ;; *) [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]] ;; esac
}
settings=("OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}")
if [ -n "${DS_ACCELERATOR:-}" ]; then
    settings+=("DS_ACCELERATOR=$DS_ACCELERATOR")
elif ! has_gpu; then
    settings+=("DS_ACCELERATOR=cpu")
fi
command=(
    env "${settings[@]}" deepspeed --num_gpus "$ranks" --master_port "$port" --no_local_rank --module comlrl_ds train "$@"
)
printf '+'
for word in "${command[@]}"; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then printf ' %s' "$word"; else printf ' %s' "${word@Q}"; fi
done
echo
# SIGTERM would end DeepSpeed's runner and leave the ranks behind: it goes to the launcher below, which ends them. Ctrl-C
# reaches them by itself, once the default that bash takes from what it starts in the background is back.
(trap - INT && exec "${command[@]}") &
runner=$!
trap 'kill -TERM $(cat "/proc/$runner/task/$runner/children") 2>/dev/null || true' TERM
trap : INT
code=0
while kill -0 "$runner" 2>/dev/null; do
    wait "$runner" && code=0 || code=$?
done
exit "$code"
