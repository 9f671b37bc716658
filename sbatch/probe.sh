#!/usr/bin/env bash
# probe.sh FOLDER: a rank of the job of `elastic-doctor --try` (lib/elastic/people/tryout.py).
#
# It writes what it sees of its node, waits for a file, and from then on says on stderr what happens to
# it. Rank 0 holds a lock, which the others look for; the last rank kills itself.
set -euo pipefail

folder="$1" lock="$1/lock"
unset OMP_NUM_THREADS OMP_THREAD_LIMIT # for nproc, too

say() {
    echo "rank ${RANK} $*" >&2
}
trap 'trap : TERM && say "hears the notice"' TERM # at once: a flag that is looked at can be missed

# REPLY: the least of the memory limits of the cgroups around this process, in bytes; empty if there is
# none, which version 1 writes as an enormous number.
memory_limit() {
    local kinds path file limit least=""
    while IFS=: read -r _ kinds path; do
        [[ -z "${kinds}" || "${kinds}" == *memory* ]] || continue
        path="/sys/fs/cgroup${kinds:+/memory}${path%/}"
        while [[ "${path}" == /sys/fs/cgroup* ]]; do
            for file in "${path}/memory.max" "${path}/memory.limit_in_bytes"; do
                { read -r limit <"${file}"; } 2>/dev/null || continue
                [[ "${limit}" =~ ^[0-9]{1,15}$ ]] || continue
                ((limit >= ${least:-limit + 1})) || least="${limit}"
            done
            path="${path%/*}"
        done
    done </proc/self/cgroup
    REPLY="${least}"
}

# Slurm may give more cores than there are, where nodes are pretended.
look() {
    local gpus="${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-}}" each=() memory mine all
    local given="${SLURM_CPUS_ON_NODE:-0}"
    mine="$(nproc)" all="$(nproc --all)" memory="no limit of memory"
    IFS=, read -ra each <<<"${gpus}"
    memory_limit
    [[ -z "${REPLY}" ]] || memory="$(numfmt --to=si "${REPLY}" || echo "${REPLY} ")B of memory"
    printf '{"view": "%s (hostname %s): %d cores, %s, GPUs %s", ' \
        "${SLURMD_NODENAME}" "$(uname -n)" "${mine}" "${memory}" "${gpus:-none}"
    printf '"cores": %d, "given_cores": %d, "gpus": %d, "given_gpus": %d}\n' \
        "${mine}" "$((given < all ? given : all))" "${#each[@]}" "${SLURM_GPUS_ON_NODE:-0}"
}

if ((RANK == 0)); then
    exec 9>"${lock}"
    flock --nonblock 9 || true
fi
look >"${folder}/rank-${RANK}.json"
say "is here"

until [[ -e "${folder}/word" ]]; do sleep 0.05 || true; done
locked=""
((RANK == 0)) || flock --nonblock --conflict-exit-code=9 "${lock}" true || (($? != 9)) || locked=", and that it is locked"
say "sees it${locked}"

if ((RANK == WORLD_SIZE - 1)); then
    say "kills itself"
    kill -KILL "$$"
fi
while sleep 0.05 || true; do :; done # until the step is ended
