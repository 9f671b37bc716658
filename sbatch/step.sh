# shellcheck shell=bash
# What single-node.sbatch and multi-node.sbatch share: the layout, the step, the notice. Sourced.
# shellcheck source=/dev/null
source "${ELASTIC_HOME}/sbatch/network.sh"

# What the ranks find in their environment. Rank logs go to ELASTIC_RUN_DIR, of which a restart keeps all.
# REPLY: how many are on a node: one per GPU, or one where there are none. rank.sh checks it on every node.
elastic::environment() {
    unset SLURM_EXPORT_ENV # else srun starts the ranks without PATH at sites that set SBATCH_EXPORT=NONE
    unset SLURM_TRES_PER_TASK # from 23.11 on srun takes the job's cores on a node for those of each task
    # An outer job's, where sbatch was called inside of one; those of its own job srun knows anyway.
    [[ -z "${RANK:-}" ]] || unset RANK LOCAL_RANK WORLD_SIZE MASTER_{ADDR,PORT} "${!NCCL_@}" "${!GLOO_@}"
    unset SLURM_GPUS SLURM_GPUS_PER_{NODE,TASK} SLURM_NTASKS_PER_GPU SLURM_MEM_PER_{CPU,NODE,GPU}
    export ELASTIC_JOB_ID="${SLURM_JOB_ID}" ELASTIC_ATTEMPT="$((${SLURM_RESTART_COUNT:-0} + 1))"
    export ELASTIC_RUN_DIR="${ELASTIC_RUN_DIR:-${SLURM_SUBMIT_DIR}/runs/${SLURM_JOB_NAME}-${SLURM_JOB_ID}}"
    [[ ! -e "${ELASTIC_RUN_DIR}" || -O "${ELASTIC_RUN_DIR}" ]] ||
        { echo "error: ${ELASTIC_RUN_DIR} is another user's: set ELASTIC_RUN_DIR" >&2 && exit 2; }
    export MASTER_ADDR="${MASTER_ADDR:-$(elastic::master_addr "${SLURM_JOB_NODELIST}")}"
    export MASTER_PORT="${MASTER_PORT:-$(elastic::master_port "${SLURM_JOB_ID}" "${MASTER_ADDR}")}"
    local gpus="${SLURM_GPUS_ON_NODE:-0}"
    REPLY="${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}}"
    if ((gpus > 0 && REPLY != gpus)); then
        echo "error: ${REPLY} tasks per node, ${gpus} GPUs per node" >&2
        echo "  hint: one rank per GPU: --ntasks-per-node=${gpus}, or without it (an outer job's counts)" >&2
        exit 2
    fi
    export ELASTIC_RANKS_PER_NODE="${REPLY}"
}

# elastic::step RANKS_PER_NODE COMMAND...: run it on all nodes, and end with its exit status.
#
# Slurm gives its notice to the step; what this shell gets itself (--signal=B:USR1@…, the final TERM)
# goes there by scancel, again and again while the controller is too busy for it, and never to srun,
# which would kill the ranks at once. A rank that left on a notice made a file: the job then goes back
# to the queue, unless a TERM says that Slurm ends it: one that is cancelled must not be requeued. Its
# exit status does not say so: srun would end the step, and with it the rank that still saves.
#
# The job's own `scontrol requeue` is needed on every Slurm. Before 24.05 nothing else requeues a job that
# leaves in its grace. Later ones do, but take that for a failed launch, and hold the job at the fifth; and
# 24.11 starts a job once more that, after a notice, has ended with 0: it says so to its next start.
elastic::step() {
    local told="" passed="" step code job="${SLURM_JOB_ID}" cpus
    cpus="$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE}" | sort -n | sed 's/(.*//;q')" # of the smallest node
    local over="${ELASTIC_RUN_DIR}/over-${SLURM_JOB_ID}"
    export ELASTIC_NOTICED="${ELASTIC_RUN_DIR}/noticed-${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}"
    ((${SLURM_RESTART_COUNT:-0})) || rm -f "${over}" "${ELASTIC_NOTICED}" # of another job: ids come back
    if [[ -e "${over}" ]]; then
        echo "this job ended with 0 before: nothing is left to do"
        exit 0
    fi
    # The last task of an array has the id of the array, which means all of its tasks.
    [[ "${SLURM_ARRAY_JOB_ID:-}" != "${job}" ]] || job+="_${SLURM_ARRAY_TASK_ID}"
    [[ "${ELASTIC_REQUEUE:-1}" == 1 ]] || scontrol update "JobId=${job}" Requeue=0 || true
    trap 'told=TERM' TERM
    trap 'told="${told:-USR1}"' USR1
    srun --nodes="${SLURM_JOB_NUM_NODES}" --ntasks="$((SLURM_JOB_NUM_NODES * $1))" \
        --ntasks-per-node="$1" --cpus-per-task="${CPUS_PER_RANK:-$((cpus > $1 ? cpus / $1 : 1))}" \
        --mpi=none --kill-on-bad-exit=1 --wait=0 "${ELASTIC_HOME}/sbatch/rank.sh" "${@:2}" &
    step="$!"
    while kill -0 "${step}" 2>/dev/null; do
        wait "${step}" || true # a signal ends it, too
        until [[ -z "${told}" || -n "${passed}" ]] || ! kill -0 "${step}" ||
            scancel --signal=TERM "${job}"; do
            sleep 1 || true # the final TERM ends it
        done 2>/dev/null
        passed="${told}"
    done
    wait "${step}" && code=0 || code="$?"
    ! rm "${ELASTIC_NOTICED}" 2>/dev/null || ((code != 0)) || code=75
    ((code != 0)) || touch "${over}" || true
    [[ "${code}" != 75 || -n "${told}" ]] || sleep 1 || true # steps hear of an end before this shell does
    if [[ "${code}" == 75 && "${told}" != TERM && "${ELASTIC_REQUEUE:-1}" == 1 ]]; then
        echo "a notice was obeyed: back to the queue"
        scontrol requeue "${job}" || { sleep 5 && [[ "${told}" != TERM ]] &&
            scontrol requeue "${job}"; } || [[ "${told}" == TERM ]] || echo "not requeued: submit it again" >&2
    fi
    exit "${code}"
}
