"""A program for the templates: each rank says who it is, and what all add up to over gloo.

With an argument it then trains on, until a notice, which it obeys with exit status 0.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

noticed = []  # no Event: set() in a handler may wait for a lock that wait() holds
signal.signal(signal.SIGTERM, lambda *_: noticed.append(True))
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE")
said = " ".join(f"{name}={os.environ[name]}" for name in names)
print(f"{said} total={total.item():g} node={os.environ.get('SLURMD_NODENAME')}", flush=True)
if sys.argv[1:]:
    while not noticed:
        time.sleep(0.1)
    print(f"rank {dist.get_rank()} saves", file=sys.stderr, flush=True)
dist.destroy_process_group()
