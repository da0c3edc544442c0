#!/bin/sh
# Checks manifests/ without a cluster.
#
#   tests/manifests/check.sh [--self-test] [DIRECTORY]
#
# --self-test breaks copies of the manifests on purpose and demands that each break is found.
# DIRECTORY keeps the Python environment for the next time; without it, one is made and removed.
# Needs kubectl, and python3 with venv and pip. Only pip uses the network, and only to make the environment.
set -eu

fail() {
    echo "check.sh: $1" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)
self_test=
directory=
for argument in "$@"; do
    case $argument in
        --self-test) self_test=yes ;;
        -*) fail "no such option: $argument" ;;
        *)
            [ -z "$directory" ] || fail "more than one directory: $argument"
            directory=$argument
            ;;
    esac
done

command -v kubectl >/dev/null || fail "kubectl is missing"
command -v python3 >/dev/null || fail "python3 is missing"
kubectl kustomize --help >/dev/null 2>&1 || fail "kubectl has no kustomize"

if [ -z "$directory" ]; then
    directory=$(mktemp -d)
    trap 'rm -rf "$directory"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
fi
mkdir -p "$directory"
venv=$directory/manifests-venv
python=$venv/bin/python

# The copy of the requirements is put there last: an environment without it is half made.
if ! cmp -s "$here/requirements.txt" "$venv/requirements.txt" || ! "$python" -c 'import kubernetes_validate, yaml'; then
    rm -rf "$venv"
    python3 -m venv "$venv" || fail "python3 cannot make a virtual environment (Debian: python3-venv)"
    "$python" -m pip --version >/dev/null || fail "pip is missing (Debian: python3-venv)"
    "$python" -m pip install --quiet --disable-pip-version-check --requirement "$here/requirements.txt" ||
        fail "pip cannot install $here/requirements.txt"
    cp "$here/requirements.txt" "$venv/requirements.txt"
fi

"$python" -B "$here/check.py"
if [ -n "$self_test" ]; then
    "$python" -B "$here/self_test.py"
fi
