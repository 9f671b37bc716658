# shellcheck shell=bash
# How this node reaches the others: sourced by rank.sh on every node, and by the templates.
#
# The interface is the one that routes to MASTER_ADDR, or that carries it; InfiniBand is preferred where
# it has an IPv4 address. Nodes differ, so each asks itself, and nothing is guessed: what is not found
# stays unset, with a line that says what to do. A variable that is set, even to nothing, is left alone.

readonly ELASTIC_INFINIBAND_TYPE=32 # ARPHRD_INFINIBAND, linux/if_arp.h
readonly ELASTIC_DEVICES="${ELASTIC_SYSFS:-/sys}/class" # tests plant one

# What NCCL and Gloo need to know.
elastic::network() {
    elastic::default TORCH_NCCL_ASYNC_ERROR_HANDLING 1
    [[ -z "${ELASTIC_NCCL_DEBUG:-}" ]] || elastic::default NCCL_DEBUG "${ELASTIC_NCCL_DEBUG}"
    [[ -v NCCL_IB_DISABLE ]] || elastic::fabric
    [[ ! -v NCCL_SOCKET_IFNAME || ! -v GLOO_SOCKET_IFNAME ]] || return 0
    if ! elastic::interface; then
        echo "network  ${REPLY}; set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to an interface with" \
            "an IPv4 address (ip -o -4 addr)" >&2
        return 0
    fi
    elastic::default GLOO_SOCKET_IFNAME "${REPLY}"
    # To NCCL a name is a prefix (bond0 means bond0.7, too), unless it begins with `=`.
    ! compgen -G "${ELASTIC_DEVICES}/net/${REPLY}?*" >/dev/null || REPLY="=${REPLY}"
    elastic::default NCCL_SOCKET_IFNAME "${REPLY}"
}

elastic::default() {
    [[ -v "$1" ]] || export "$1=$2"
}

# The first line of a file; nothing if it cannot be read, as with the types of empty GIDs.
elastic::line() {
    REPLY=""
    { read -r REPLY <"$1"; } 2>/dev/null || true
}

# ---- the interface

# Not everybody's PATH has the folder where it is.
elastic::ip() {
    PATH="${PATH}:/usr/sbin:/sbin" ip -o "$@" 2>/dev/null
}

# REPLY becomes its name; on failure, what is wrong.
elastic::interface() {
    local addresses address="${MASTER_ADDR:-}" name=""
    REPLY="no interface is chosen: MASTER_ADDR is not set"
    [[ -n "${address}" ]] || return 1
    REPLY="no interface is chosen: no answer from \`ip\` (package iproute2)"
    addresses="$(elastic::ip -4 addr show up)" || return 1
    if [[ ! "${address}" =~ ^[0-9.]+$ ]]; then
        elastic::resolve "${address}" || address="${MASTER_ADDR}, which has no IPv4 address"
        address="${REPLY:-${address}}"
    fi
    elastic::carries "${addresses}" "${address}" || elastic::routes "${address}"
    name="${REPLY}"
    if [[ "${name}" != lo ]]; then # a job on one node needs no more than that
        elastic::infiniband "${addresses}" "${name}" && name="${REPLY}"
    fi
    REPLY="no interface is chosen: none with an IPv4 address routes to ${address}"
    [[ -n "${name}" && "${addresses}" =~ (^|$'\n')[0-9]+:\ "${name}"\  ]] || return 1
    REPLY="${name}"
}

# The interface that has this very address.
elastic::carries() {
    local name family address
    while read -r _ name family address _; do
        REPLY="${name%@*}"
        [[ "${family}" != inet || "${address%/*}" != "$2" ]] || return 0
    done <<<"$1"
    return 1
}

elastic::routes() {
    REPLY="$(elastic::ip route get "$1")" || true
    [[ "${REPLY}" =~ \ dev\ ([^ ]+) ]] && REPLY="${BASH_REMATCH[1]}" || REPLY=""
}

# The one named if it is InfiniBand, else the first that is, is up, and has an IPv4 address.
elastic::infiniband() {
    local name found=""
    while read -r _ name _; do
        elastic::line "${ELASTIC_DEVICES}/net/${name}/type"
        [[ "${REPLY}" == "${ELASTIC_INFINIBAND_TYPE}" ]] || continue
        elastic::line "${ELASTIC_DEVICES}/net/${name}/operstate"
        [[ "${REPLY}" != down ]] || continue
        [[ -n "${found}" && "${name}" != "$2" ]] || found="${name}"
    done <<<"$1"
    REPLY="${found}"
    [[ -n "${found}" ]]
}

elastic::resolve() {
    REPLY=""
    read -r REPLY _ < <(getent ahostsv4 "$1")
}

# ---- InfiniBand and RoCE

# NCCL takes the active ports, native InfiniBand before RoCE; without any it need not look.
elastic::fabric() {
    local port device native="" roce="" index="" same=1
    for port in "${ELASTIC_DEVICES}"/infiniband/*/ports/*; do
        elastic::line "${port}/state"
        [[ "${REPLY}" == *": ACTIVE" ]] || continue
        device="${port%/ports/*}"
        device="${device##*/}:${port##*/}"
        elastic::line "${port}/link_layer"
        case "${REPLY}" in
            InfiniBand) native+=",${device}" ;;
            Ethernet)
                roce+=",${device}"
                elastic::gid_index "${port}"
                [[ -n "${REPLY}" && "${index:-${REPLY}}" == "${REPLY}" ]] || same=0
                index="${REPLY}"
                ;;
        esac
    done
    if [[ -z "${native}${roce}" ]]; then
        [[ -v NCCL_IB_HCA ]] || elastic::default NCCL_IB_DISABLE 1
    elif [[ -n "${native}" ]]; then
        elastic::default NCCL_IB_HCA "=${native#,}"
    else
        elastic::default NCCL_IB_HCA "=${roce#,}"
        if ((same)); then
            elastic::default NCCL_IB_GID_INDEX "${index}"
        elif [[ ! -v NCCL_IB_GID_INDEX ]]; then
            echo "network  ${roce#,} have no RoCE v2 address (IPv4) at one index; NCCL chooses, or set" \
                "NCCL_IB_GID_INDEX (show_gids)" >&2
        fi
    fi
}

# Which of a port's addresses is RoCE v2 over IPv4: the first; empty if none.
elastic::gid_index() {
    local number=-1
    while [[ -e "$1/gids/$((++number))" ]]; do
        elastic::line "$1/gids/${number}"
        [[ "${REPLY}" == 0000:0000:0000:0000:0000:ffff:* ]] || continue
        elastic::line "$1/gid_attrs/types/${number}"
        [[ "${REPLY}" != "RoCE v2" ]] || break
    done
    [[ -e "$1/gids/${number}" ]] && REPLY="${number}" || REPLY=""
}

# ---- where the ranks meet

# The first node of NODELIST, as an IPv4 address; where its name has none, as Slurm itself reaches it. If
# that is a name, too, which Debian gives to loopback on the node itself: the address that routes elsewhere.
elastic::master_addr() {
    local node shown address
    read -r node < <(scontrol show hostnames "$1")
    elastic::resolve "${node}" && [[ "${REPLY}" != 127.* ]] && echo "${REPLY}" && return
    shown="$(scontrol --oneliner show node "${node}")"
    [[ "${shown}" =~ \ NodeAddr=([^ ]+) ]] && address="${BASH_REMATCH[1]}" || address="${node}"
    [[ "${node}" == "${SLURMD_NODENAME:-}" && ! "${address}" =~ ^(127\.|localhost$) ]] &&
        elastic::resolve "${address}" && [[ "${REPLY}" == 127.* ]] &&
        [[ "$(elastic::ip route get 192.0.2.1)" =~ \ src\ ([0-9.]+) ]] && address="${BASH_REMATCH[1]}"
    echo "${address}"
}

# From the job's id (two jobs on a node differ), the next one that nobody listens on at ADDRESS; below
# the ports that the kernel hands out.
elastic::master_port() {
    local port="$((12000 + $1 % 20000))"
    while (exec 3<>"/dev/tcp/$2/${port}") 2>/dev/null; do ((++port)); done
    echo "${port}"
}
