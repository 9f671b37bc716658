"""One replica of another system's round; bench_peers.py starts several, in a venv of their own.

A replica does five trivial inner steps, then takes its pseudo-gradient, has it averaged in float32
by `torchft` or `hivemind`, and applies the outer step (SGD with Nesterov momentum). It writes how
long that took, each round, to FOLDER/answer-RANK.json, and waits until its standard input ends;
then it ends with its whole process group.

Everything listens on 127.0.0.1 only. Nothing is compressed, and nobody is ever missing: what is
left is to move the bytes.
"""

import argparse
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from bench_task import Flat

LOOPBACK, INNER_STEPS = "127.0.0.1", 5
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
PATIENCE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path)
    for name in ("rank", "workers", "parameters", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as our workers have
    threading.Thread(target=end_with_input, daemon=True).start()
    task = Flat({"parameters": options.parameters})
    model = task.model()
    replica = SYSTEMS[options.system](options, model, task.optimizer(model))
    answer = measure(options, task, replica)
    write(options.folder / f"answer-{options.rank}.json", json.dumps(answer))
    threading.Event().wait()  # with all its processes, whose memory is looked at now


def end_with_input() -> None:
    os.read(0, 1)  # sys.stdin would be locked in a forked child, which closes it
    os.killpg(0, signal.SIGKILL)


def measure(options, task: Flat, replica) -> dict:
    """The stalls of all rounds but the first, and what went over the loopback meanwhile."""
    stalls, sent = [], 0
    for number in range(options.rounds + 1):
        replica.prepare()
        barrier(options, f"round-{number}")
        sent = sent if number > 1 else loopback_bytes()
        for _ in range(INNER_STEPS):
            replica.inner.zero_grad()
            task.loss(replica.model, torch.tensor([float(options.rank)])).backward()
            began = time.monotonic()
            replica.inner.step()
        replica.synchronize()
        stalls.append(time.monotonic() - began)
    barrier(options, "end")
    per_round = (loopback_bytes() - sent) / options.rounds
    total = sum(param.double().sum().item() for param in replica.model.parameters())
    return {"stalls_s": stalls[1:], "bytes": per_round, "sum": total}


class TorchFT:
    """Its DiLoCo, with a lighthouse in replica 0 and a manager in each."""

    def __init__(self, options, model, inner):
        from torchft import coordination
        from torchft.local_sgd import DiLoCo

        self.model, self.inner = model, inner
        if options.rank == 0:
            self._lighthouse = coordination.LighthouseServer(f"{LOOPBACK}:0", options.workers)
            port = self._lighthouse.address().rpartition(":")[2]
            write(options.folder / "lighthouse", f"http://{LOOPBACK}:{port}")
        manager = self._manager(options, read(options.folder / "lighthouse"))
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        self._hooks = DiLoCo(manager, [model], inner, outer, sync_every=INNER_STEPS)
        self._hooks.__enter__()

    def _manager(self, options, lighthouse: str):
        from torchft import manager
        from torchft.process_group import ProcessGroupGloo

        served = manager.ManagerServer  # which the manager would let listen on every address
        manager.ManagerServer = lambda **given: served(**given | {"bind": f"{LOOPBACK}:0"})
        self._store = loopback_store()
        patience = timedelta(seconds=PATIENCE_S)
        return manager.Manager(
            pg=ProcessGroupGloo(patience), load_state_dict=None, state_dict=None,
            min_replica_size=options.workers, use_async_quorum=False, init_sync=False,
            timeout=patience, quorum_timeout=patience, rank=0, world_size=1, hostname=LOOPBACK,
            store_addr=LOOPBACK, store_port=self._store.port, lighthouse_addr=lighthouse,
            replica_id=f"replica_{options.rank}", checkpoint_transport=no_checkpoints(),
        )

    def prepare(self) -> None:
        pass

    def synchronize(self) -> None:
        """DiLoCo has done it, in a hook of the last inner step."""


def loopback_store():
    """A TCPStore left to itself listens on every address."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return torch.distributed.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def no_checkpoints():
    """Nobody joins late, so there is nothing to serve, on any address."""
    from torchft.checkpointing import CheckpointTransport

    class Nothing(CheckpointTransport):
        def metadata(self) -> str:
            return ""

        def send_checkpoint(self, *_args, **_named) -> None:
            raise NotImplementedError

        recv_checkpoint = send_checkpoint

    return Nothing()


class Hivemind:
    """Its DecentralizedAverager over a DHT. As its optimizer does, groups are formed ahead, while
    training; only the all-reduce is waited for."""

    def __init__(self, options, model, inner):
        import hivemind
        from hivemind.p2p import P2P

        self.model, self.inner = model, inner
        P2P._UNIX_SOCKET_PREFIX = f"/unix{options.folder}/"  # else they are left in /tmp
        meeting = options.folder / "peers"
        self._dht = hivemind.DHT(
            json.loads(read(meeting)) if options.rank else None, start=True,
            host_maddrs=[f"/ip4/{LOOPBACK}/tcp/0"], nat_port_map=False, auto_nat=False,
            use_relay=False,
        )
        if options.rank == 0:
            write(meeting, json.dumps([str(each) for each in self._dht.get_visible_maddrs()]))
        self._base = [param.detach().clone() for param in model.parameters()]
        self._outer = torch.optim.SGD(self._base, **OUTER)
        self._averager = hivemind.DecentralizedAverager(
            [torch.zeros_like(each) for each in self._base], self._dht, start=True, prefix="bench",
            target_group_size=options.workers, min_group_size=options.workers,
        )

    def prepare(self) -> None:
        """Form the group of this round."""
        self._group = self._averager.step(require_trigger=True, wait=False, timeout=PATIENCE_S)
        until(lambda: self._group.stage.name == "AWAITING_TRIGGER")

    @torch.no_grad()
    def synchronize(self) -> None:
        params = list(self.model.parameters())
        with self._averager.get_tensors() as deltas:
            for delta, before, param in zip(deltas, self._base, params, strict=True):
                torch.sub(before, param, out=delta)
        self._group.allow_allreduce()
        self._group.result(timeout=PATIENCE_S)
        with self._averager.get_tensors() as means:
            for before, mean in zip(self._base, means, strict=True):
                before.grad = mean
            self._outer.step()
        for before, param in zip(self._base, params, strict=True):
            param.copy_(before)


SYSTEMS = {"torchft": TorchFT, "hivemind": Hivemind}


# ---- replicas among themselves ------------------------------------------------------------------


def barrier(options, name: str) -> None:
    """Wait until every replica is here."""
    (options.folder / f"{name}.{options.rank}").touch()
    until(lambda: len(list(options.folder.glob(f"{name}.*"))) == options.workers)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


def read(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def write(path: Path, text: str) -> None:
    """Whole for every reader."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def loopback_bytes() -> int:
    """All that was ever sent over the loopback, by anybody."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
