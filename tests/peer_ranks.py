"""Ranks for test_launch_env.py: `peer_ranks.py TIMEOUT_S NODES STORY...`, a rank for each story.

Forked from here, so that torch is imported once. With NODES=1 all are on one node, else each on
its own. A rank says what join_group raised, or what the ranks add up to; the list goes to stdout.
Stories: `nobody` advertises a port at which nobody listens, `deaf` one whose listener answers
nothing, `absent` does not come, `looks` also says at which addresses it listens then.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from elastic.base.errors import ElasticError  # noqa: E402
from elastic.base.network import free_port  # noqa: E402
from elastic.train import peers  # noqa: E402
from elastic.train.device import join_group  # noqa: E402
from helpers import listening  # noqa: E402

honest = peers.check
held = []


def deaf_port(address: str) -> int:
    """Of a listener whose queue is full: the kernel drops further connections."""
    server = socket.create_server((address, 0), backlog=0)
    clients = [socket.socket() for _ in range(2)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex(server.getsockname())
    held.extend([server, *clients])
    return server.getsockname()[1]


def play(story: str, rank: int, world: int, timeout_s: float) -> dict:
    def check(store, me, *rest):
        ports = {"nobody": free_port, "deaf": deaf_port}
        port = ports[story](me.address) if story in ports else me.port
        return honest(store, me._replace(port=port), *rest, connect_s=1.0)

    peers.check = check
    try:
        join_group(rank, world, torch.device("cpu"), timeout_s)
    except ElasticError as error:
        return {"error": error.what, "hint": error.hint}
    total = torch.ones(1)
    dist.all_reduce(total)
    said = {"total": total.item()}
    return said | {"listens": sorted(listening([os.getpid()]))} if story == "looks" else said


def main() -> None:
    timeout, nodes, stories = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    pipes = []
    for rank, story in enumerate(stories):
        if story == "absent":
            continue
        reader, writer = os.pipe()
        pipes.append(reader)
        if os.fork():
            os.close(writer)
            continue
        node, local = (f"n{rank + 1}", 0) if nodes > 1 else ("n1", rank)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local), "SLURMD_NODENAME": node}
        said = play(story, rank, len(stories), timeout)
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    print("[" + ",".join(os.fdopen(pipe).read() for pipe in pipes) + "]")


if __name__ == "__main__":
    main()
