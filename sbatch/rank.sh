#!/usr/bin/env bash
# rank.sh COMMAND...: one rank of a job, in the variables that torch and NCCL read.
#
# A notice (any of the signals below) becomes ELASTIC_NOTICE_SIGNAL for the command, and exit status 75
# for the launcher, whatever the command makes of it: many programs leave with 0 when they are told to.
# With ELASTIC_NOTICED it becomes that file, and 0, for a launcher that would end the others at the first 75.
#
# In a run (ELASTIC_RUN_DIR) all that the rank says is added to logs/ranks/rank-NNN.log there. Its stderr,
# and the stdout of rank 0, go on to where they always went.
set -euo pipefail
umask go-w
[[ "${1:-}" != -h && "${1:-}" != --help ]] || exec sed -n '2s/^# /usage: /p' "${BASH_SOURCE[0]}"
signals=(TERM INT USR1 USR2)
signal="${ELASTIC_NOTICE_SIGNAL:-TERM}" noticed="" heard_s=0 child=""

# Slurm tells every process of a step, and a save told twice may break; with proctrack/cgroup this shell alone.
is_told() { [[ "${SLURM_STEP_ID:+${noticed}}" == "${signal}" ]] && ! grep -Eqs '(:freezer|^0:).*/step_' /proc/self/cgroup; }
# The command hears of a notice once, unless ten minutes lie between. Who presses Ctrl-C again means it.
# shellcheck disable=SC2317,SC2329 # the traps call it
hear() {
    [[ "${noticed}" != "$1" || "$1" == INT ]] || ((SECONDS - heard_s > 600)) || return 0
    noticed="$1" heard_s="${SECONDS}"
    [[ -z "${child}" ]] || is_told || kill -s "${signal}" "${child}" 2>/dev/null || true
}
trap 'hear TERM' TERM; trap 'hear INT' INT; trap 'hear USR1' USR1; trap 'hear USR2' USR2

# shellcheck source=/dev/null
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/network.sh"

export RANK="${SLURM_PROCID:-${RANK}}" WORLD_SIZE="${SLURM_NTASKS:-${WORLD_SIZE}}"
export LOCAL_RANK="${SLURM_LOCALID:-${LOCAL_RANK}}" # the user's shell may speak of another job, or of none
node="${SLURMD_NODENAME:-${HOSTNAME}}" job="${SLURM_JOB_ID:+SLURM_JOB_ID=${SLURM_JOB_ID}}"
export -n ELASTIC_NOTICED # the command may start ranks of its own
copies=() line=""

# A job of `--gpus=6` may have 4 here and 2 there. The templates say how many ranks a node has.
gpus="${SLURM_GPUS_ON_NODE:-0}" ranks="${ELASTIC_RANKS_PER_NODE:-0}"
if ((gpus != 0 && ranks != 0 && gpus != ranks)); then
    echo "error: node ${node}: ${ranks} ranks, ${gpus} GPUs" >&2
    echo "  hint: ask for as many GPUs on every node: --gres=gpu:N, not --gpus=N" >&2
    exit 2
fi

# A notice, or what asks for stacks, reaches every process of a step: the copies must outlive it, to
# copy the last words.
copy() {
    trap '' "${signals[@]}" HUP ABRT
    exec tee -a -- "$1"
}

open_log() {
    local log said
    printf -v log '%s/logs/ranks/rank-%03d.log' "${ELASTIC_RUN_DIR}" "${RANK}"
    printf -v said '== %(%FT%T%z)T job %s restart %s attempt %s node %s rank %s/%s' -1 \
        "${SLURM_JOB_ID:-${ELASTIC_JOB_ID:-none}}" "${SLURM_RESTART_COUNT:-0}" \
        "${ELASTIC_ATTEMPT:-1}" "${node}" "${RANK}" "${WORLD_SIZE}"
    # Through a link, or a folder of another user's, the words would go into any file.
    if ! { (umask 022 && mkdir -p "${log%/*}") && [[ -O "${log%/*}" && ! -L "${log}" ]] && echo "${said}" >>"${log}"; }; then
        echo "rank ${RANK} has no log of its own" >&2
        return 0
    fi
    ((RANK == 0)) || exec >/dev/null
    exec > >(copy "${log}")
    copies+=("$!")
    exec 2> >(copy "${log}" >&2)
    copies+=("$!")
}

# Until the last words are written; not for ever: what the command left behind may hold its stderr.
close_log() {
    local pid tries=0
    exec >/dev/null 2>&1
    for pid in "${copies[@]}"; do # bash cannot `wait` for more than one of them
        while ((++tries < 100)) && kill -0 "${pid}"; do
            sleep 0.02 || true
        done
    done
}

# A line to the launcher, held once per node for as long as its end is open: how a node that loses its
# power is missed. Where none can be had the other ranks notice, later.
hold_line() {
    local host port password
    trap '' "${signals[@]}" HUP ABRT
    IFS=: read -r host port password <<<"${ELASTIC_KEEPALIVE}"
    exec <>"/dev/tcp/${host}/${port}" >&0
    echo "${password} ${node}"
    exec cat >/dev/null
}

if [[ -n "${ELASTIC_KEEPALIVE:-}" && "${LOCAL_RANK}" == 0 ]]; then
    hold_line 2>/dev/null &
    line="$!"
fi

# What a launcher that died of the notice (bash, conda run) has left at work hears of it, and may save.
outlast() {
    local pid left above told=" "
    while left=" $(trap '' "${signals[@]}"; grep -lzsxF "${mark}" /proc/[0-9]*/environ | xargs -r grep -lzsxF "${job:-${mark}}" | tr -cs 0-9 ' ')"
        [[ "${left}" == *[0-9]* ]]; do # not what it has submitted: that is another job's
        for pid in ${left}; do # but no helper of theirs, such as the workers of a DataLoader
            above="$(sed -n 's/^PPid:\t//p' "/proc/${pid}/status")"
            [[ "${told}" != *" ${pid} "* && "${left}" != *" ${above} "* ]] || continue
            told+="${pid} "
            is_told || kill -s "${signal}" "${pid}"
        done
        sleep 0.2
    done 2>/dev/null || true
}

mark="ELASTIC_RANK_MARK=${node}:$$:$(date +%s)"
[[ -z "${ELASTIC_RUN_DIR:-}" ]] || open_log
elastic::network

# A notice reaches the command itself as well. It would die of one that it does not expect: it gets
# the signal of its choice, and the others pass by, unless it takes them itself.
(
    for each in "${signals[@]}"; do [[ "${each}" == "${signal}" ]] || trap '' "${each}"; done
    export "${mark?}"
    exec "$@"
) <&0 & # else it would have /dev/null
child="$!"
[[ -z "${noticed}" ]] || kill -s "${signal}" "${child}" 2>/dev/null || true # it came before there was a child

# The trap interrupts `wait`; wait again until the status is the command's own.
while code=0; wait "${child}" || code="$?"; kill -0 "${child}" 2>/dev/null; do :; done
# Slurm tells one process after the other, some plugins the command first: it may have left by then.
[[ -n "${noticed}" || -z "${SLURM_STEP_ID:+${ELASTIC_ATTEMPT:-}}" || " 0 130 138 140 143 " != *" ${code} "* ]] || sleep 3 || true
if [[ -n "${noticed}" ]]; then
    ((code < 128)) || outlast
    touch "${ELASTIC_NOTICED:-}" 2>/dev/null && code=0 || code=75
fi
[[ -z "${line}" ]] || kill -KILL "${line}" 2>/dev/null || true
((${#copies[@]} == 0)) || close_log
exit "${code}"
