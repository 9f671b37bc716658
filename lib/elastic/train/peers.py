"""Do all ranks come, and can their nodes talk? This is asked before the first collective,
which would hang.

All it needs is a store: if all ranks are on one node, a file that only its owner can
open, else a server of rank 0, at MASTER_ADDR and no other address. Every rank says who it
is; rank 0 waits for all of them and says which ranks lead the nodes (LOCAL_RANK 0). Each
leader listens on the interface that Gloo will use, and connects to every other leader:
the kernel's handshake is the proof, so nobody accepts. Rank 0 collects the failures, and
all ranks raise the same sentence. On one node the ranks only say that they are there,
which takes milliseconds.
"""

import json
import os
import socket
import time
from collections import namedtuple
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from elastic.base.environment import env
from elastic.base.errors import ElasticError
from elastic.base.network import bind_address, interfaces, node_name, routed
from elastic.jobs.slurm_info import get_slurm_info

CONNECT_S = 10.0
LATEST_S = 3600.0  # that a rank may come after the others
HEARD_S = 2.0  # rank 0 keeps the store for so long after bad news
AT_ONCE, BACKLOG = 64, 4096
HINT = "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME: another interface; slurm.exclude: other nodes"

# A rank, and where the leader of its node listens.
Peer = namedtuple("Peer", "rank node leads address interface port")


def meet(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store of this job, once all ranks are there and their nodes reach each other.
    Raises ElasticError."""
    node, host, port = node_name(), env("MASTER_ADDR"), int(env("MASTER_PORT"))
    address, name = _own_address(host)
    leads = env("LOCAL_RANK", "0") == "0"
    appear_s = min(LATEST_S, 0.9 * timeout.total_seconds())
    try:
        store = _store(rank, world, timeout, host, port)
        with socket.create_server((address, 0), backlog=BACKLOG) as server:
            me = Peer(rank, node, leads, address, name, server.getsockname()[1])
            problem = check(store, me, world, appear_s)
    except (RuntimeError, OSError) as error:
        why = str(error).splitlines()[0]
        problem = f"node {node} (rank {rank}) has no answer from rank 0 at {host}:{port}: {why}"
    if problem:
        raise ElasticError(problem, HINT)
    return store


def _store(rank: int, world: int, timeout: timedelta, host: str, port: int) -> dist.Store:
    file = env("ELASTIC_RENDEZVOUS", "")
    if os.path.exists(file):  # not from another PID namespace
        store = dist.FileStore(file, world)
        store.set_timeout(timeout)
        return store
    common = {"world_size": world, "timeout": timeout, "wait_for_workers": False}
    if rank > 0:
        return dist.TCPStore(host, port, **common)
    address = bind_address("auto", host)
    # Torch's own would listen on all addresses.
    common["master_listen_fd"] = socket.create_server((address, port), backlog=BACKLOG).detach()
    return dist.TCPStore(address, port, is_master=True, **common)


def check(store: dist.Store, me: Peer, world: int, appear_s: float, connect_s=CONNECT_S) -> str:
    """Empty if all is well, else who is missing, or which node cannot reach which; on all
    ranks."""
    store = dist.PrefixStore("elastic/peers", store)
    store.set(f"rank/{me.rank}", json.dumps(me))
    if me.rank == 0:
        store.set("leaders", json.dumps(_leaders(store, world, appear_s)))
    problem, rows = json.loads(store.get("leaders"))
    leaders = [Peer(*row) for row in rows]
    if me in leaders:
        store.set(f"failed/{me.rank}", json.dumps(_failures(me, leaders, connect_s)))
    if me.rank == 0:
        failed = [why for peer in leaders for why in json.loads(store.get(f"failed/{peer.rank}"))]
        store.set("verdict", problem or "; ".join(failed[:5]))
    verdict = store.get("verdict").decode()
    time.sleep(HEARD_S if verdict and me.rank == 0 else 0)
    return verdict


def _own_address(master: str) -> tuple[str, str]:
    """Where this node listens: on Gloo's interface, else on the one that routes to
    `master`."""
    name, known = env("GLOO_SOCKET_IFNAME", "").split(",")[0], interfaces()
    if name and name not in known:
        what = f"node {node_name()}: GLOO_SOCKET_IFNAME = {name!r} has no IPv4 address"
        raise ElasticError(what, f"interfaces with one: {', '.join(known)}")
    address = known[name] if name else routed(master)
    return address, next((name for name in known if known[name] == address), "")


def _leaders(store: dist.Store, world: int, appear_s: float) -> tuple[str, list[list]]:
    keys = [f"rank/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timedelta(seconds=appear_s))
    except RuntimeError:  # what a file raises; what a server raises is one, too
        missing = _names(rank for rank, key in enumerate(keys) if not store.check([key]))
        return f"{missing} of {world} ranks did not come within {appear_s:g} s", []
    peers = [Peer(*json.loads(store.get(key))) for key in keys]
    return "", [peer for peer in peers if peer.leads]


def _names(ranks: Iterable[int]) -> str:
    """Ranks, with their nodes where Slurm says them."""
    info = get_slurm_info()
    layout = zip(info.nodes, info.tasks_per_node, strict=False) if info else ()
    node = dict(enumerate(f" (node {name})" for name, count in layout for _ in range(count)))
    return ", ".join(f"rank {rank}{node.get(rank, '')}" for rank in ranks)


def _failures(me: Peer, leaders: list[Peer], connect_s: float) -> list[str]:
    def reach(peer: Peer) -> str:
        try:
            where, source = (peer.address, peer.port), (me.address, 0)
            socket.create_connection(where, connect_s, source).close()
            return ""
        except OSError as error:
            why = "timed out" if isinstance(error, TimeoutError) else error.strerror
        to = f"node {peer.node} at {peer.address} ({peer.interface})"
        return f"node {me.node} cannot reach {to}: {why}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(filter(None, pool.map(reach, [peer for peer in leaders if peer != me])))
