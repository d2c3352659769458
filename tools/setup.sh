#!/usr/bin/env bash
# Make .venv in this checkout and install everything at the versions of constraints.txt. A second
# call does nothing.
#
#   PYTHON=python3.11       the interpreter (default: python3.11, else python3; at least 3.11)
#   RLPIPE_EXTRAS=cpu,dev   extras of pyproject.toml (default: those of .venv; for a new one gpu,dev
#                           if nvidia-smi lists a GPU, else cpu,dev)
#   RLPIPE_INSTALLER=uv     uv or pip (default: uv if it is installed, else pip)
#
# With `gpu`, SGLang brings the CUDA packages that it declares, resolved against constraints.txt.
# Without CUDA this takes two steps, because SGLang declares packages that exist for CUDA only:
# first our requirements and those that SGLang needs on a CPU (the extra `cpu`), then SGLang itself
# without its requirements.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/.rlpipe-setup
stamped=$(cat "$stamp" 2>/dev/null || true)
extras=${RLPIPE_EXTRAS:-${stamped%% *}}
if [[ -z $extras ]]; then
    [[ $(nvidia-smi --list-gpus 2>/dev/null || true) == GPU* ]] && extras=gpu,dev || extras=cpu,dev
fi
digest=$(cat constraints.txt pyproject.toml tools/setup.sh | sha256sum | cut -d' ' -f1)

if [[ -x .venv/bin/python && $stamped == "$extras $digest" ]]; then
    echo "setup: .venv is up to date (extras: $extras)"
    exit 0
fi

fail() {
    echo "setup: $*" >&2
    exit 1
}

[[ ! -L .venv ]] || fail ".venv is a link to $(readlink .venv), the environment of another" \
    "checkout. Remove the link."

installer=${RLPIPE_INSTALLER:-$(command -v uv > /dev/null && echo uv || echo pip)}
[[ $installer == uv || $installer == pip ]] ||
    fail "RLPIPE_INSTALLER is $installer; expected uv or pip"
[[ $installer == pip ]] || command -v uv > /dev/null ||
    fail "RLPIPE_INSTALLER is uv, but uv is not on the PATH; install it, or unset the variable"

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }
if [[ ! -x .venv/bin/python ]]; then
    # Without PYTHON, uv downloads an interpreter if the machine has none that is new enough.
    if [[ $installer == uv && -z ${PYTHON:-} ]] && ! new_enough "$python"; then
        python=3.11
    else
        new_enough "$python" || fail "Python 3.11 or newer is needed, found" \
            "${python:-none} $("$python" --version 2>&1 || true). Install it (Debian, Ubuntu:" \
            "apt-get install python3-venv python3-pip), or set PYTHON=/path/to/python3.11"
    fi
    echo "setup: creating .venv with $installer and Python ($python)"
    if [[ $installer == uv ]]; then
        uv venv --quiet --seed --python "$python" .venv
    else
        # Debian ships venv without ensurepip, so the pip of the system installs pip.
        "$python" -m venv --without-pip .venv
        "$python" -m pip --python .venv/bin/python install --quiet --quiet pip
    fi
fi
# After an interrupted setup, the next call continues with the same extras.
echo "$extras unfinished" > "$stamp"

if [[ $installer == uv ]]; then
    install=(uv pip install --quiet --python .venv/bin/python)
    # uv does not read pip's variables.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:+${PIP_FIND_LINKS// /,}}}
    if [[ -n ${PIP_INDEX_URL:-} ]]; then
        export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
    fi
    # torch of PyPI is built for CUDA. The CPU build is on PyTorch's own index, or in a folder of
    # wheels that the user names.
    if [[ ,$extras, == *,cpu,* && -z $UV_FIND_LINKS ]]; then
        install+=(--torch-backend "${UV_TORCH_BACKEND:-cpu}")
    fi
else
    install=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet)
fi

# Run an installer, which prints nothing for minutes. A line every 30 s has the size of .venv.
with_progress() {
    while sleep 30 > /dev/null 2>&1 && kill -0 $$ 2> /dev/null; do
        echo "setup: $SECONDS s, $(du -sh .venv 2> /dev/null | cut -f1) of $size in .venv"
    done &
    local shows=$!
    trap 'kill "$shows" 2> /dev/null || true' EXIT
    "$@"
    trap - EXIT
    kill "$shows" && wait "$shows" 2> /dev/null || true
}

[[ ,$extras, == *,gpu,* ]] && size="10 GB" || size="3.5 GB"
echo "setup: 1/2 rlpipe with [$extras] at the versions of constraints.txt" \
    "($installer; $size on disk, some minutes)"
with_progress "${install[@]}" --constraint constraints.txt --editable ".[$extras]"
echo "setup: 2/2 SGLang and mbridge without their declared requirements"
with_progress "${install[@]}" --no-deps --constraint constraints.txt sglang mbridge

echo "$extras $digest" > "$stamp"
.venv/bin/python - << 'END'
from importlib.metadata import version

names = ("torch", "sglang", "megatron-core", "ray", "prefect")
print("setup: done;", ", ".join(f"{name} {version(name)}" for name in names))
print("setup: `source .venv/bin/activate`, then `rlpipe doctor` checks this machine")
END
