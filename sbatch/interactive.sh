#!/usr/bin/env bash
# interactive.sh JOBID COMMAND...: run a command in an allocation that there is (salloc, or a job):
#     sbatch/interactive.sh 4711 python train.py           one rank per GPU, on all its nodes
#     NODES=1 RANKS_PER_NODE=1 sbatch/interactive.sh 4711 bash
# It shares the job's GPUs with whatever runs there. NODES, RANKS_PER_NODE, CPUS_PER_RANK, MASTER_ADDR,
# MASTER_PORT and ELASTIC_RUN_DIR (rank logs) come from the environment, where they are set.
set -euo pipefail
home="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd -P)"
# shellcheck source=/dev/null
source "${home}/sbatch/network.sh"

die() {
    echo "error: $1" >&2
    echo "  hint: $2" >&2
    exit "${3:-1}"
}

# The value of KEY= in what scontrol said of the job.
of_job() {
    [[ "${shown}" =~ (^|\ )"$1"=([^ ]*) ]] && echo "${BASH_REMATCH[2]}"
}

[[ "${1:-}" =~ ^[0-9]+$ && "$#" -gt 1 ]] || die "which job, and which command?" \
    "interactive.sh JOBID COMMAND...; squeue --me" 2
job="$1"
shift
shown="$(scontrol --details --oneliner show job "${job}" 2>&1)" ||
    die "no job ${job}: ${shown}" "it ended long ago, or never was: squeue --me"
user="$(of_job UserId)"
[[ "${user}" == *"($(id -u))" ]] || die "job ${job} is not yours but ${user}'s" "squeue --me"
case "$(of_job JobState)" in
    RUNNING) ;;
    PENDING | CONFIGURING) die "job ${job} has not started" "squeue --job ${job} says why" ;;
    *) die "job ${job} has expired: it is $(of_job JobState)" "salloc makes a new one" ;;
esac

for name in "${!SLURM_@}"; do # of another job, in which this shell may be
    [[ "${name}" == SLURM_CONF ]] || unset "${name}"
done
nodes="$(of_job NumNodes)"
gpus=0
[[ ! "${shown}" =~ \ GRES=gpu(:[^:\(]*)?:([0-9]+) ]] || gpus="${BASH_REMATCH[2]}"
ranks="${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
cpus="$(($(of_job NumCPUs) / nodes / ranks))"
MASTER_ADDR="${MASTER_ADDR:-$(elastic::master_addr "$(of_job NodeList)")}"
MASTER_PORT="${MASTER_PORT:-$(elastic::master_port "$((job + $$))" "${MASTER_ADDR}")}"
export MASTER_ADDR MASTER_PORT
nodes="${NODES:-${nodes}}"
options=()
[[ ! -t 0 || "$((nodes * ranks))" != 1 ]] || options+=(--pty)
exec srun --jobid="${job}" --overlap --nodes="${nodes}" --ntasks="$((nodes * ranks))" \
    --ntasks-per-node="${ranks}" --cpus-per-task="${CPUS_PER_RANK:-$((cpus > 0 ? cpus : 1))}" \
    --mpi=none "${options[@]}" "${home}/bin/elastic-rank" "$@"
