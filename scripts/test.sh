#!/usr/bin/env bash
# Sets up .venv if need be and runs the tests:
#   ./scripts/test.sh                  those that are not marked slow
#   ./scripts/test.sh --all            all
#   ./scripts/test.sh [--all] tests/test_x.py -k name ...      other arguments are passed to pytest
# Without other arguments the files are shared out among three processes: on two cores, as some tests mostly wait.
set -eu
cd "$(dirname "$0")/.."
. scripts/set_up.sh dev
unset PYTHONDONTWRITEBYTECODE
if [ -d tests/machinery ]; then # in the template, not in a project made by scripts/new.py
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    .venv/bin/pyright
fi
chosen=(-m "not slow")
if [ "${1:-}" = --all ]; then
    chosen=()
    shift
fi
[ $# -gt 0 ] || set -- -n 3 --dist loadfile --no-loadscope-reorder
exec .venv/bin/python -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
