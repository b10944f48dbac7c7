"""train.py as a process of train.sbatch's job: requeue.py then knows by which exception it ends."""

import train
from lib.utils.errors import run_program
from scripts.slurm import requeue

if __name__ == "__main__":
    run_program(requeue.recorded(train.main))
