# shellcheck shell=bash disable=SC2034
# What the scripts of this folder have in common; they source it with their own arguments:
#
#   RUN_DIR=/shared/runs/name launch/SCRIPT [--dry-run] CONFIG [--field value ...]
#
# Every script ends in the same command, "${train[@]}". RUN_DIR lies on storage that all processes
# see, under the same path after a restart: then the run resumes by itself.
# CHECK=v5p:4x4x4 plans the run for that topology first (launch/aot_check.sh) and stops if it does
# not fit.

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

need() { # NAME MEANING: an environment variable that has to be given
    [[ -n ${!1:-} ]] || fail "$1 is not set: give $2"
}

number() { # NAME LEAST MEANING: an environment variable that, where it is given, is a whole number
    [[ -z ${!1:-} ]] || { [[ ${!1} =~ ^(0|[1-9][0-9]{0,5})$ ]] && ((${!1} >= $2)); } ||
        fail "$1 is '${!1}': give $3, $2 or more"
}

check() { # CONFIG...: with CHECK, whether the run fits, told on stderr; scripts ask when all is given
    [[ -z ${CHECK:-} ]] || run env TOPOLOGY="$CHECK" "$launch/aot_check.sh" "$@" >&2
}

run() { # COMMAND...: done, or with --dry-run only shown
    if $dry_run; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi
[[ -n ${1:-} && $1 != -* ]] || fail "give a config file, such as configs/depthbench.py"
need RUN_DIR "the run's directory on storage that all processes see"
train=("${PYTHON:-python}" -m depthjax train "$1" --run.dir "$RUN_DIR" "${@:2}")

# The programs that were compiled before a restart are not compiled again after it.
cache=${JAX_COMPILATION_CACHE_DIR:-$(dirname "$RUN_DIR")/compile-cache}
# Recorded in the run's environment.json, where the code is no git checkout.
commit=${DEPTHJAX_COMMIT:-$(git -C "$launch" rev-parse HEAD 2>/dev/null || echo unknown)}
