#!/usr/bin/env bash
# Everything that reads the code without running it. Goes through to the end, then fails if anything did.
#   tools/check.sh          report
#   tools/check.sh --fix    let ruff mend what it can first
set -uo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
code=(rlpipe flows tasks deployments tools tests)
failed=()

step() {
    echo "check: $*"
    "$@" || failed+=("$1${2:+ $2}")
}

if [[ ${1:-} == --fix ]]; then
    ruff check --quiet --fix "${code[@]}"
    ruff format --quiet "${code[@]}"
fi
step ruff check --quiet "${code[@]}"
step ruff format --check --quiet "${code[@]}"
step pyright --warnings
step lint-imports
step codespell "${code[@]}" Makefile pyproject.toml CHANGELOG.md $(ls README.md 2>/dev/null)

if ((${#failed[@]})); then
    printf 'check: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "check: all clean"
