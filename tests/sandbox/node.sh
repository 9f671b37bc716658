# Start a node's daemon under a host name of its own, which Slurm does not know. What is submitted
# there comes from another address than what is submitted elsewhere (AllocNodes=localhost refuses
# it). A folder, if one is given, it sees through a mount of its own: what others changed there
# shows up to a minute late, and a flock holds on this node alone.
#
# unshare --uts --mount sh node.sh HOST COMMAND…
set -eu
hostname "$1"
shift
mount --bind '@DIR@/hosts' /etc/hosts
mount --bind '@DIR@/munge-nodes.socket' '@DIR@/munge.socket'
folder=@STALE@
cached='attr_timeout=60,entry_timeout=60,negative_timeout=60'
if [ -n "${folder}" ]; then
    command -v bindfs >/dev/null || { echo "error: no bindfs: apt-get install bindfs" >&2; exit 1; }
    bindfs -o "${cached}" "${folder}" "${folder}"
fi
exec "$@"
