#!/usr/bin/env bash
# Make .venv with everything pinned. Does nothing when that is done already.
#
#   bash scripts/setup.sh          what a run needs
#   bash scripts/setup.sh --dev    and what the tests need
#
# LAMINAR_PYTHON       interpreter to use (3.11 or 3.12); default: the first that is found, if possible one
#                      that was built with optimizations
# LAMINAR_DEVICE       cpu or gpu; default: gpu where nvidia-smi works
# LAMINAR_TORCH_INDEX  URL of an index with torch's CPU build, if pip's own has only the (much larger) CUDA build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=run
case "${1:-}" in
    "") ;;
    --dev) mode=dev ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
log=.venv/install.log
SECONDS=0

say() { printf '[setup %3d s] %s\n' "$SECONDS" "$*"; }
fail() { say "$*" >&2; exit 1; }

# Run a command with its output in the log; on failure show the end of it.
logged() {
    printf '\n+ %s\n' "$*" >>"$log"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 25 "$log" >&2
        fail "failed: $* (all of it: $log)"
    fi
}

# Install Debian packages if this is Debian and we may; else say what is needed: debian_packages WHY PACKAGE...
debian_packages() {
    local why=$1 command="apt-get install -y --no-install-recommends"
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "$why; as root: apt-get update && $command $*"
    fi
    say "$why: $command $*"
    # shellcheck disable=SC2086 # words of a command
    if ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive $command -qq "$@"; } >/dev/null 2>&1; then
        fail "that failed; see what it says: apt-get update && $command $*"
    fi
}

has_compiler() {
    command -v gcc >/dev/null &&
        [ -f "$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

# Built with profile-guided optimization (those of distributions are, and do not say so), and complete: makes environments, has headers.
optimized() {
    "$1" -c 'import ensurepip, os, sys, sysconfig, venv
built = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "") or sys.base_prefix == "/usr"
sys.exit(not (built and os.path.exists(sysconfig.get_path("include") + "/Python.h")))' 2>/dev/null
}

# The first in PATH that is optimized, for the others make controller and simulator slower; else the first.
find_python() {
    local candidate first="" names=(${LAMINAR_PYTHON:-python3.11 python3.12 python3})
    while read -r candidate; do
        usable "$candidate" || continue
        first=${first:-$candidate}
        if optimized "$candidate"; then
            first=$candidate
            break
        fi
    done < <(type -aP "${names[@]}")
    [ -n "$first" ] || fail "found no python 3.11 or 3.12 (tried: ${names[*]}); install one, or name it in LAMINAR_PYTHON"
    printf '%s\n' "$first"
}

device=${LAMINAR_DEVICE:-}
if [ -z "$device" ]; then
    if nvidia-smi >/dev/null 2>&1; then device=gpu; else device=cpu; fi
fi
locks=("requirements/$device.lock")
[ -f "${locks[0]}" ] || fail "LAMINAR_DEVICE: $device; expected cpu or gpu"
[ "$mode" = run ] || locks+=(requirements/dev.lock)

# Everything that decides what .venv holds, the folder included: a moved environment does not work.
fingerprint() {
    { .venv/bin/python -VV; pwd; echo "$device"; cat "$@" setup.cfg pyproject.toml; } | sha256sum | cut -d' ' -f1
}

stamp=.venv/.laminar-$mode
if usable .venv/bin/python && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "${locks[@]}")" ]; then
    say "already done ($device, $mode)"
    exit 0
fi

if ! { usable .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        debian_packages "python $version cannot make environments" "python$version-venv"
    say "making .venv with $python ($version$(optimized "$python" || echo ", built without optimizations or not complete"))"
    "$python" -m venv --clear .venv
fi
: >"$log"
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)

if [ "$device" = cpu ]; then
    # vLLM's CPU build wants torch's. Where there is none to be had, the CUDA build works too, with all that it needs.
    torch=$(sed -n 's/^torch==//p' requirements/cpu.lock)
    say "torch $torch"
    if [ -n "${LAMINAR_TORCH_INDEX:-}" ]; then
        logged "${pip[@]}" install --no-deps --index-url "$LAMINAR_TORCH_INDEX" "torch==$torch+cpu"
    elif ! "${pip[@]}" install --no-deps "torch==$torch+cpu" >>"$log" 2>&1; then
        say "pip's index has no CPU build of torch: taking the CUDA build, several GB (LAMINAR_TORCH_INDEX names an index that has it)"
        logged "${pip[@]}" install "torch==$torch"
    fi
    ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' ||
        debian_packages "vLLM on CPU needs libnuma" libnuma1
fi
if ! .venv/bin/python -c 'import pycosat' 2>/dev/null && ! has_compiler .venv/bin/python; then
    version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    debian_packages "pycosat (of reasoning-gym) comes as C source" gcc libc6-dev "python$version-dev"
fi
for lock in "${locks[@]}"; do
    say "$(grep -c '==' "$lock") packages of $lock"
    logged "${pip[@]}" install --no-deps -r "$lock"
done
say "laminar itself"
logged "${pip[@]}" install --no-deps --no-build-isolation -e .

fingerprint "${locks[@]}" >"$stamp"
[ "$mode" = run ] || fingerprint "${locks[0]}" >.venv/.laminar-run
say "done: $(du -sh .venv | cut -f1) in .venv"
