#!/usr/bin/env bash
# Make .venv in this checkout and install everything at the versions of constraints.txt. A second call does nothing.
#
#   PYTHON=python3.11       the interpreter to start from (default: python3.11, else python3; at least 3.11)
#   RLPIPE_EXTRAS=cpu,dev   which extras of pyproject.toml (default: those of .venv; of a new one gpu,dev where nvidia-smi lists
#                           a GPU, else cpu,dev)
#
# With gpu SGLang brings the CUDA packages it declares itself, and pip resolves them against constraints.txt (which pins the
# SGLang, torch and transformers that belong together).
#
# Without CUDA it takes two steps, because SGLang declares packages that exist for CUDA only: first our requirements and
# what SGLang really imports on a CPU (the extra `cpu`), then SGLang itself without its requirements.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
stamp=.venv/.rlpipe-setup
stamped=$(cat "$stamp" 2>/dev/null || true)
extras=${RLPIPE_EXTRAS:-${stamped%% *}}
if [[ -z $extras ]]; then
    [[ $(nvidia-smi --list-gpus 2>/dev/null || true) == GPU* ]] && extras=gpu,dev || extras=cpu,dev
fi
wanted="$extras $(cat constraints.txt pyproject.toml tools/setup.sh | sha256sum | cut -d' ' -f1)"

if [[ -x .venv/bin/python && $stamped == "$wanted" ]]; then
    echo "setup: .venv is up to date (extras: $extras)"
    exit 0
fi

if [[ -L .venv ]]; then
    echo "setup: .venv is a link to $(readlink .venv); installing there would change another checkout's environment. Remove the link." >&2
    exit 1
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed, found $("$python" --version 2>&1) at $python; set PYTHON=/path/to/python3.11" >&2
    exit 1
}

if [[ ! -x .venv/bin/python ]]; then
    echo "setup: making .venv with $("$python" --version)"
    # Debian ships venv without ensurepip, so pip comes in from outside.
    "$python" -m venv --without-pip .venv
    "$python" -m pip --python .venv/bin/python install --quiet --quiet pip
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
echo "$extras unfinished" > "$stamp" # broken off here, the next call goes on with the same extras

[[ ,$extras, == *,gpu,* ]] && size="10 GB" || size="3.5 GB"
echo "setup: 1/2 rlpipe with [$extras] at the versions of constraints.txt ($size on disk, minutes)"
"${pip[@]}" install --quiet --quiet --constraint constraints.txt --editable ".[$extras]"
echo "setup: 2/2 SGLang and mbridge without their declared requirements"
"${pip[@]}" install --quiet --quiet --no-deps --constraint constraints.txt sglang mbridge

echo "$wanted" > "$stamp"
echo "setup: done; $(.venv/bin/python -c 'from importlib.metadata import version as v; print(*(f"{p} {v(p)}" for p in ("torch", "sglang", "megatron-core", "ray", "prefect")), sep=", ")')"
