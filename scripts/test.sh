#!/usr/bin/env bash
# Sets up .venv if need be, then checks the code's form and runs the tests: ./scripts/test.sh [tests/test_x.py -k name ...]
set -eu
cd "$(dirname "$0")/.."
. scripts/set_up.sh dev
unset PYTHONDONTWRITEBYTECODE
.venv/bin/ruff format --check .
.venv/bin/ruff check .
exec .venv/bin/python -m pytest "$@"
