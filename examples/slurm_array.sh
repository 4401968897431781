#!/bin/bash
# A run without calibration as an array of SLURM jobs: sbatch examples/slurm_array.sh MODEL OUT
# MODEL and OUT are folders that all machines see, or addresses such as s3://BUCKET/MODEL. Whoever ends last completes OUT.
# A job that fails or is preempted is queued again and goes on: what is done by then stays.
#SBATCH --job-name=tilepress
#SBATCH --array=0-15
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=02:00:00
#SBATCH --requeue
# `tilepress compress quantize MODEL -o OUT --dry-run` says how many jobs, how much memory and how long.

set -euo pipefail
# Each job of an array is one task of its own to SLURM, rank 0 of 1: the array's own numbers say which part is whose.
tilepress compress quantize "$1" -o "$2" --quiet \
    --rank "$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))" --world-size "$SLURM_ARRAY_TASK_COUNT"
