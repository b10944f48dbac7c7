#!/usr/bin/env bash
# Once, on the login node of a cluster: loads the modules, then makes .venv with all that Baton needs (nodes seldom reach
# the internet). Afterwards: python train.py -slurm ..., or sbatch scripts/slurm/train.sbatch ...
set -eu
cd "$(dirname "$0")/../.."
. scripts/slurm/modules.sh
. scripts/set_up.sh
echo "ready: . .venv/bin/activate; python train.py -slurm -slurm_nnodes 1 -slurm_ngpus 4 -slurm_partition NAME"
