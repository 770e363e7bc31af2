#!/usr/bin/env bash
# Trains on all machines of a hostfile, through ssh and pdsh. This folder, the working directory and the run's folder must
# have the same path on all of them.
#
#   launch/multinode.sh hosts run.yaml run.seed=2    # words after the run file are settings
#
#   MASTER_ADDR  address of the first machine of the hostfile (default: the first that `hostname -I` names there)
#   MASTER_PORT  port there at which the ranks meet (default: 29500)
#   SSH_PORT     port of the machines' sshd (default: ssh's own)
set -euo pipefail
usage="usage: launch/multinode.sh HOSTFILE run.yaml [path.to.setting=value ...]"
fail() { echo "multinode: $*" >&2; exit 2; }
[ $# -ge 2 ] || fail "$usage"
[ -f "$1" ] || fail "there is no hostfile '$1'; $usage"
[ -f "$2" ] || fail "there is no run file '$2'; $usage"
hostfile=$1
shift
lines=$(grep -vE '^[[:space:]]*(#|$)' "$hostfile" || true)
[ -n "$lines" ] || fail "$hostfile lists no machine; write 'name slots=N' lines"
bad=$(grep -vEm1 '^[[:space:]]*[^[:space:]]+[[:space:]]+slots=[0-9]+' <<<"$lines" || true)
[ -z "$bad" ] || fail "$hostfile: '$bad' is not understood; write 'name slots=N'"
for name in MASTER_PORT SSH_PORT; do
    [[ ${!name:-0} =~ ^[0-9]+$ ]] || fail "$name '${!name}' is not a number"
done
[ -z "${DS_ENV_FILE:-}" ] || fail "DS_ENV_FILE is set, and DeepSpeed would read that instead of .deepspeed_env; unset it"
command -v pdsh >/dev/null || fail "pdsh is missing; install it, e.g. the package pdsh"
root=$(cd "$(dirname "$0")/.." && pwd)
"$root/launch/setup.sh"
export PATH="$root/.venv/bin:$PATH" OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

# DeepSpeed hands a node nothing but PYTHON* and a few others, unless .deepspeed_env says so. It takes every line of that as
# NAME=VALUE, so there is no room for a comment or a blank line, and the mark that the file is ours is a variable too.
mark="COMLRL_DS_ENV_FILE=launch/multinode.sh"
secret() { [[ ${1//TOKENIZERS_PARALLELISM/} =~ KEY|TOKEN|SECRET|PASSW|CREDENTIAL ]]; }
if [ -e .deepspeed_env ] && [ "$(head -n 1 .deepspeed_env)" != "$mark" ]; then
    fail "$PWD/.deepspeed_env was not written by this script; move it away, or start from another folder"
fi
content=$mark$'\n'
for name in $(compgen -e); do
    case "$name" in
        COMLRL_DS_ENV_FILE) continue ;;
        PATH | PYTHONPATH | DS_ACCELERATOR | HF_HOME | HF_HUB_OFFLINE | TOKENIZERS_PARALLELISM) ;;
        OMP_* | NCCL_* | GLOO_* | VLLM_* | WANDB_* | COMLRL_DS_*) ;;
        *) continue ;;
    esac
    value=${!name}
    if secret "${name^^}"; then continue; fi
    # DeepSpeed puts the value between double quotes on the nodes' command line, at most.
    case "$value" in *[\"\$\`\\]* | *$'\n'*)
        fail "$name has a quote, \$, \`, backslash or line break, which does not reach the nodes as it is; change or unset it" ;;
    esac
    content+=$name=${value//%/%%}$'\n' # pdsh replaces %h, %n, %u
done
temporary=$(mktemp .deepspeed_env.XXXXXX)
printf '%s' "$content" >"$temporary"
mv "$temporary" .deepspeed_env

# The words pass DeepSpeed, which quotes those with a space, by half; then pdsh, which replaces %h, %n and %u; then the shell
# of each node.
words=()
for word in "$@"; do
    if [[ $word == *$'\n'* ]]; then fail "a setting with a line break does not reach the nodes; write it into the run file"; fi
    if [[ $word == *" "* ]]; then
        word=${word//\\/\\\\} word=${word//\$/\\\$} word=${word//\`/\\\`}
    elif ! [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then
        word="'${word//\'/\'\\\'\'}'"
    fi
    words+=("${word//%/%%}")
done
command=(env)
# Variables that DeepSpeed hands on by itself, on command lines that every user of a node can read.
for name in $(compgen -e); do
    case "$name" in
        MLFLOW* | PYTHON* | MV2* | UCX* | NCCL*) if secret "${name^^}"; then command+=(-u "$name"); fi ;;
    esac
done
command+=(deepspeed --hostfile "$hostfile" --force_multi --master_port "${MASTER_PORT:-29500}")
command+=(${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} ${SSH_PORT:+--ssh_port "$SSH_PORT"})
command+=(--no_local_rank --module comlrl_ds train "${words[@]}")
printf '+'
for word in "${command[@]}"; do
    if [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then printf ' %s' "$word"; else printf ' %s' "${word@Q}"; fi
done
echo
exec "${command[@]}"
