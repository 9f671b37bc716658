#!/bin/bash
# What people write: a job that Slurm requeues, and a script that saves every so many steps.
# sbatch plain_requeue.sh PYTHON SCRIPT FOLDER STEP_S SAVE_EVERY
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
unset SLURM_EXPORT_ENV
trap '' TERM # who leaves within the notice is done, for Slurm, and not requeued
srun --ntasks=1 --mpi=none "$1" "$2" "$3" "$4" "$5"
