#!/usr/bin/env bash
# interactive.sh JOBID COMMAND...: run a command in an allocation that there is (salloc, or a job):
#     sbatch/interactive.sh 4711 python train.py           one rank per GPU, on all its nodes
#     NODES=1 RANKS_PER_NODE=1 sbatch/interactive.sh 4711 bash
# It shares the job's GPUs with whatever runs there. NODES, RANKS_PER_NODE, CPUS_PER_RANK, MASTER_ADDR,
# MASTER_PORT and ELASTIC_RUN_DIR (rank logs) come from the environment, where they are set.
set -euo pipefail
home="$(readlink -f "${BASH_SOURCE[0]}")" home="${home%/*/*}"
# shellcheck source=/dev/null
source "${home}/sbatch/network.sh"

die() {
    echo "error: $1" >&2
    echo "  hint: $2" >&2
    exit "${3:-1}"
}

[[ "${1:-}" =~ ^[0-9]+$ && "$#" -gt 1 ]] || die "which job, and which command?" \
    "interactive.sh JOBID COMMAND...; squeue --me" 2
job="$1"
shift
for name in "${!SLURM_@}" "${!SQUEUE_@}"; do # of another job, in which this shell may be
    [[ "${name}" == SLURM_CONF* ]] || unset "${name}"
done

# Nothing that a user can name is among these: anybody's job may have any name.
shown="$(squeue --all --noheader --states=all --jobs="${job}" --format="%U %T %D %N" 2>&1)" || true
[[ "${shown}" =~ ^([0-9]+)\ ([A-Z_]+)\ ([1-9][0-9]*)\ ([^[:space:]]*) ]] ||
    die "no job ${job}: ${shown}" "it ended long ago, or never was: squeue --me"
read -r user state nodes nodelist <<<"${BASH_REMATCH[0]}"
[[ "${user}" == "$(id -u)" ]] || die "job ${job} is not yours but uid ${user}'s" "squeue --me"
case "${state}" in
    RUNNING) ;;
    PENDING | CONFIGURING) die "job ${job} has not started" "squeue --job ${job} says why" ;;
    *) die "job ${job} has expired: it is ${state}" "salloc makes a new one" ;;
esac

gpus=0
shown="$(scontrol --details --oneliner show job "${job}")"
[[ ! "${shown}" =~ \ GRES=gpu(:[^:\(]*)?:([0-9]+) ]] || gpus="${BASH_REMATCH[2]}"
ranks="${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
cpus="$(tr ' ' '\n' <<<"${shown}" | awk -F'[=,]' '/^CPU_IDs=/ { n = 0; for (i = 2; i <= NF; i++) {
    split($i "-" $i, ids, "-"); n += ids[2] - ids[1] + 1 }; print n }' | sort -n | head -n 1)" # of the smallest node
MASTER_ADDR="${MASTER_ADDR:-$(elastic::master_addr "${nodelist}")}"
MASTER_PORT="${MASTER_PORT:-$(elastic::master_port "$((job + $$))" "${MASTER_ADDR}")}"
export MASTER_ADDR MASTER_PORT
nodes="${NODES:-${nodes}}"
options=()
[[ ! -t 0 || "$((nodes * ranks))" != 1 ]] || options+=(--pty)
exec srun --jobid="${job}" --overlap --nodes="${nodes}" --ntasks="$((nodes * ranks))" \
    --ntasks-per-node="${ranks}" --cpus-per-task="${CPUS_PER_RANK:-$((cpus > ranks ? cpus / ranks : 1))}" \
    --mpi=none "${options[@]}" "${home}/sbatch/rank.sh" "$@"
