#!/usr/bin/env bash
# Sets up .venv if need be, then trains: ./scripts/train.sh [-cpu 2 -epochs 3 ...], the arguments of train.py.
set -eu
cd "$(dirname "$0")/.."
. scripts/set_up.sh ""
exec .venv/bin/python train.py "$@"
