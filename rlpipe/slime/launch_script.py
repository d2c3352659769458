"""Read the arguments of training from a launch script of slime.

    train_words(Path("run-qwen3-4B.sh"), {"BASE_FOLDER": "/data"})    the words after train.py
    read_launch(Path("run-qwen3-4B.sh"), {}).environment              variables of the Ray job

Launch scripts build arrays (`MODEL_ARGS=(...)`), source the script of a model, compute values in
loops, stop old processes, start Ray and submit `python3 train.py ${MODEL_ARGS[@]} ...`. bash itself
expands all of this here, but starts no program: PATH is empty, builtins with effects are replaced,
and commands with a path or with a file to write are skipped, except `cat` to a name of `mktemp`.
The launched command is printed instead of run. This protects from the effects of an ordinary
script, not from a hostile one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rlpipe.errors import ConfigError

TIMEOUT_S = 30.0
PROGRAMS = ("train.py", "train_async.py")
SHOWN_CHARACTERS = 600
_PRELUDE = r"""
shopt -s extdebug expand_aliases
unset BASH_ENV ENV
__script=$0
__folder=${__script%/*}
__scratch=$2
__print() { printf '%s\0' "$#" "$@" >&3; }
dirname() {
    while [[ $1 == -* ]]; do shift; done
    case $1 in */*) local parent=${1%/*}; printf '%s\n' "${parent:-/}" ;; *) echo . ;; esac
}
basename() { local name=${1##*/}; printf '%s\n' "${name%"${2:-}"}"; }
realpath() { (builtin cd -- "$(dirname "${!#}")" && printf '%s/%s\n' "$PWD" "${!###*/}"); }
readlink() { realpath "$@"; }
seq() {
    local first=1 step=1 last
    case $# in 1) last=$1 ;; 2) first=$1 last=$2 ;; *) first=$1 step=$2 last=$3 ;; esac
    for ((; step > 0 ? first <= last : first >= last; first += step)); do echo "$first"; done
}
source() {
    local place
    for place in "$1" "$__folder/$1" "$__folder/../$1"; do
        [[ -f $place ]] && { builtin source "$place"; return; }
    done
    __print missing "$1"
}
.() { source "$@"; }
__programs="ray python python3 torchrun nohup accelerate bash sh exec"
for __name in $__programs; do
    eval "$__name() { __print command $__name \"\$@\"; }"
done
mktemp() {
    local name=${!#}
    [[ $# == 0 || $name == -* ]] && name=file
    name=${name##*/}
    echo "$__scratch/${name//XXX*X/$RANDOM$RANDOM}"
}
cat() {
    local file
    (($#)) || builtin set -- /dev/stdin
    for file; do [[ -e $file ]] && builtin printf '%s\n' "$(<"$file")"; done
}
for __name in kill trap set shopt enable wait ulimit hash umask disown; do
    eval "$__name() { :; }"
done
read() { return 1; }
command_not_found_handle() { [[ $1 == -* ]] && __print continuation "$@"; return 0; }
readonly PATH
__allowed() {
    [[ $BASH_COMMAND =~ ^[A-Za-z_][A-Za-z0-9_]*(\[[^]]*\])?\+?= ]] && return 0
    local name=${BASH_COMMAND%%[[:space:]]*}
    case $name in
        */*) return 1 ;;
        cat)
            local line=${BASH_COMMAND%%$'\n'*}
            [[ $line != *\>* ]] && return 0
            [[ $line =~ ^cat\ *\>\ *\"?\$\{?([A-Za-z0-9_]+)\}?\"?(\ *\<\<.*)?$ ]] || return 1
            local file=${BASH_REMATCH[1]}
            [[ ${!file} == "$__scratch"/* ]]
            ;;
        echo | printf | : | true | \>*)
            local text=${BASH_COMMAND//\/dev\/null/}
            [[ ! $text =~ \>\|?[[:space:]]*[^\&[:space:]\|] ]] ;;
    esac
}
"""
"""Functions that replace programs and builtins. `__print` writes a record to file descriptor 3: the
number of words and the words, each followed by a zero byte."""
_RUN = """
builtin set -CT
builtin ulimit -f 64
builtin trap __allowed DEBUG
builtin source "$1"
"""


class Launch(NamedTuple):
    """What a launch script starts."""

    words: list[str]
    """Words after train.py or train_async.py."""
    environment: dict[str, str]
    """`env_vars` of the Ray job."""


def train_words(
    script: Path, variables: Mapping[str, str], scratch: Path | None = None
) -> list[str]:
    """Return the words of `read_launch`."""
    return read_launch(script, variables, scratch).words


def read_launch(script: Path, variables: Mapping[str, str], scratch: Path | None = None) -> Launch:
    """Return the words that the script passes to train.py or train_async.py, and the environment.

    `variables`: shell variables that the script reads from its environment. `scratch`: folder of
    the files that the script makes with mktemp; None: they are removed.
    Raises: ConfigError if the script does not exist, sources a missing file, or does not start
    training.
    """
    if not script.is_file():
        raise ConfigError(
            "the launch script does not exist",
            where=str(script),
            do="give the path of a script, or the arguments of train.py",
        )
    records, output = _expanded(script, variables, scratch)
    for words in reversed(list(_commands(records))):
        for number, word in enumerate(words):
            if Path(word).name in PROGRAMS:
                return Launch(words[number + 1 :], _job_environment(words[:number]))
    if missing := [words[0] for kind, *words in records if kind == "missing"]:
        raise ConfigError(
            "the launch script sources a file that does not exist",
            where=str(script),
            found=", ".join(missing),
            do="copy the file next to the script",
        )
    raise ConfigError(
        "the launch script does not start training",
        where=str(script),
        found=output.strip()[-SHOWN_CHARACTERS:] or "no output",
        expected=f"a command with {' or '.join(PROGRAMS)}",
        do="give variables that the script needs as NAME=VALUE after its path",
    )


def _job_environment(words: list[str]) -> dict[str, str]:
    """Return the variables of `ray job submit --runtime-env-json`; {} if it is no valid JSON."""
    option = "--runtime-env-json"
    text = next((word for word in words if word.startswith(f"{option}=")), "").partition("=")[2]
    if option in words[:-1]:
        text = words[words.index(option) + 1]
    try:
        variables = json.loads(text)["env_vars"]
        return {str(name): str(value) for name, value in variables.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _commands(records: list[list[str]]) -> Iterator[list[str]]:
    """Yield the words of each command.

    A line of flags after a command belongs to it: run-kimi-k2-Instruct.sh has no backslash before
    its last lines, so that bash starts train.py without most of its flags.
    """
    words: list[str] | None = None
    for kind, *found in records:
        if kind == "continuation" and words is not None:
            words = [*words, *found]
            continue
        if words is not None:
            yield words
        words = found if kind == "command" else None
    if words is not None:
        yield words


def _expanded(
    script: Path, variables: Mapping[str, str], scratch: Path | None
) -> tuple[list[list[str]], str]:
    """Return the records of the script, and its output. Raises: ConfigError."""
    shell = shutil.which("bash")
    if shell is None:
        raise ConfigError(
            "bash is not installed", where=str(script), do="give the arguments of train.py instead"
        )
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as empty, os.fdopen(reading, "rb") as records:
        program = f"exec 3>&{writing}\n{_PRELUDE}{_RUN}"
        path = str(script.absolute())
        try:
            done = subprocess.Popen(
                [shell, "--noprofile", "--norc", "-c", program, path, path, str(scratch or empty)],
                env={**os.environ, **variables, "PATH": empty},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        try:
            output, errors = done.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            done.kill()
            done.communicate()
            raise ConfigError(
                f"the launch script did not end within {TIMEOUT_S:g} s",
                where=str(script),
                do="give the arguments of train.py instead",
            ) from None
        said = (output.strip() or errors).decode(errors="replace")
        return _records(records.read().decode(errors="replace")), said


def _records(text: str) -> list[list[str]]:
    """Return the records that `__print` wrote."""
    words = text.split("\0")
    records = []
    position = 0
    while position < len(words) - 1:
        count = int(words[position])
        records.append(words[position + 1 : position + 1 + count])
        position += 1 + count
    return records
