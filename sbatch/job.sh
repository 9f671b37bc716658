# shellcheck shell=bash
# What worker.sbatch, master.sbatch and trainer.sbatch share. Sourced, with their arguments: ELASTIC_HOME
# PYTHON RUN_DIR SLOT.
#
# All options of these jobs come from the command line (lib/elastic/jobs/sched_slurm.py), so none is set in
# the templates. Slurm runs a copy of them out of its spool directory: every path is absolute and comes as
# an argument.

export ELASTIC_HOME="$1" ELASTIC_PYTHON="$2" ELASTIC_JOB_ID="${SLURM_JOB_ID}"
unset SLURM_EXPORT_ENV # else srun runs commands without PATH at sites that set SBATCH_EXPORT=NONE

# elastic::under_srun [SRUN OPTION...] COMMAND...: run it, and end with its exit status.
#
# Under srun, because a preemption's notice (GraceTime) goes to job steps only. This shell stays alive
# beside it, since its exit status becomes the job's. It never signals srun: on a TERM, srun would SIGKILL
# the command at once.
elastic::under_srun() {
    local step code noticed=0
    # The final TERM reaches this shell too. One signal, one trivial trap: bash can lose a second one.
    trap 'noticed=1' TERM

    # srun does not take --cpus-per-task from the job since Slurm 22.05.
    srun --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=${SLURM_CPUS_PER_TASK}"} \
        --mpi=none --kill-on-bad-exit=1 "$@" &
    step="$!"

    # The trap interrupts `wait`; wait again until the status is srun's own.
    while noticed=0 code=0; wait "${step}" || code="$?"; ((noticed && code > 128)); do :; done
    exit "${code}"
}
