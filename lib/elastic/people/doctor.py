"""Looks at the cluster, this machine and the filesystem, and says what will work:
elastic-doctor.

Each probe looks at one thing. If it fails, its fact is Unknown with the reason, and the
others go on. diagnosis.py judges the facts. Nothing is left behind: no job, no file, no
server. Only a child, `python -m elastic.people.doctor`, imports torch, and it has a time
limit.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.base import config as configuration, network, proc
from elastic.base.config import Config
from elastic.base.durable import check_private, create_once, lock, write_atomic
from elastic.base.environment import cron_line, runs_root, user_name
from elastic.base.errors import ElasticError
from elastic.jobs import sched_slurm
from elastic.people import submission
from elastic.people.diagnosis import VERDICTS, Disk, Unknown, answer, diagnose, known
from elastic.people.dial import written_per_s
from elastic.run import estimate
from elastic.run.rundir import Endpoint, RunDir

TORCH_TIMEOUT_S = 120.0


def report(path: Path | None, overrides: Sequence[str], tell=lambda _: None, more=()) -> dict:
    """Findings for the run that `path` describes (None: for any run of this site), as
    JSON has them: "checks", and how many checks got each verdict. `tell` hears of the
    progress: (the part that is done, the probe at work). `more`: further probes, by name."""
    config = configuration.load(path, overrides) if path else configuration.load_site(overrides)
    facts = dict(config=config, path=path, overrides=overrides, clocks={},
                 here=network.node_name().split(".")[0], cron_line=cron_line())
    probes = [*PROBES.items(), *more]
    for done, (name, probe) in enumerate(probes):
        tell(f"{name} ({done + 1} of {len(probes)})")
        facts[name] = answer(probe, facts, name in VITAL)
    findings = diagnose(facts)
    verdicts = [finding.verdict for finding in findings]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    return counts | {"checks": [finding._asdict() for finding in findings]}


# ---- Slurm


def _cluster(config: Config, clocks: dict[str, float]) -> dict[str, str] | Unknown:
    if config.run.scheduler == "local":
        return Unknown('run.scheduler = "local"')
    before, cluster, after = time.time(), sched_slurm.cluster(), time.time()
    clocks["slurmctld"] = off_s(float(cluster["now"]), before, after, within_s=1.0)
    return cluster


def _limits(config: Config, cluster, partitions) -> dict[str, dict[str, str]]:
    """What accounting says of the account, and of the QOS of a job."""
    slurm, row = config.slurm, _association(config, cluster)
    theirs = [partitions.get(name, {}).get("QoS", "") for name in slurm.partition.split(",")]
    own = slurm.qos or row["Def QOS"] or row["QOS"]  # of one, a job gets that
    names = {name for name in (own, *theirs) if name not in ("", "N/A") and "," not in name}
    owners = {f"the account {row['Account']}": row}
    for qos in sched_slurm.qos(*names) if names else ():
        owners[f"the QOS {qos['Name']}"] = qos
    return owners


def _qos(config: Config, cluster) -> dict[str, str] | Unknown:
    """The workers' QOS, if it decides how their jobs are preempted."""
    if cluster["PreemptType"] != "preempt/qos":
        return Unknown("PreemptType is not preempt/qos")
    row = {} if config.slurm.qos else _association(config, cluster)
    name = config.slurm.qos or row["Def QOS"] or row["QOS"]
    return next(iter(sched_slurm.qos(name)), Unknown(f"there is no QOS {name}"))


def _association(config: Config, cluster: Mapping[str, str]) -> dict[str, str]:
    """What accounting says of this user. Raises ElasticError where it says nothing."""
    account, user = config.slurm.account, user_name()
    if "slurmdbd" not in cluster["AccountingStorageType"]:
        raise ElasticError("Slurm keeps no accounts here, and so no limits")
    if row := sched_slurm.association(user, account, cluster["ClusterName"]):
        return row
    raise ElasticError(f"accounting does not know {user} in account {account or '(default)'}")


# ---- files


def _disk(config: Config, clocks: dict[str, float]) -> Disk:
    """What the folder of runs can do, and how fast."""
    check_private(there := submission.nearest(runs_root()), is_above=True)
    place = {"prefix": ".elastic-doctor-", "dir": there, "ignore_cleanup_errors": True}
    try:
        with tempfile.TemporaryDirectory(**place) as folder:
            clocks["run folder"] = _written_off_s(Path(folder))
            faults, write = tuple(_faults(Path(folder))), written_per_s(Path(folder))
    except OSError as error:
        raise submission.cannot_write(there, f": {error.strerror}") from None
    free, least = os.statvfs(there), config.checkpoint.min_free_bytes
    return Disk(str(there), filesystem_of(there.resolve()), RunDir(there).shortage(least), faults,
                free.f_bavail * free.f_frsize, write)


def _faults(folder: Path) -> list[str]:
    """What does not work in the folder: rename and link, by which durable.py writes, and
    flock, which passes need."""
    faults, trials = [], {"rename": _replaces, "link": _links_once, "flock": _locks_once}
    for name, works in trials.items():
        try:
            faults += [] if works(folder / name) else [f"{name} does not do what it says"]
        except OSError as error:
            faults.append(f"{name} or fsync: {error.strerror}")
    return faults


def _replaces(path: Path) -> bool:
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    return path.read_bytes() == b"new"


def _links_once(path: Path) -> bool:
    return create_once(path, b"mine") and not create_once(path, b"yours")


def _locks_once(path: Path) -> bool:
    """Where a lock is refused (Lustre needs -o flock), or given to two, two passes at
    once may submit a job twice."""
    with path.open("wb") as mine, path.open("wb") as other:
        return lock(mine.fileno(), 0.0) and not lock(other.fileno(), 0.0)


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that a path is on, as /proc/mounts has it."""
    mounts = (line.split()[1:3] for line in proc.read("/proc/mounts").splitlines())
    kinds = {Path(point.replace("\\040", " ")): kind for point, kind in mounts}  # the last counts
    return next((kinds[each] for each in (path, *path.parents) if each in kinds), "unknown")


# ---- Redis, network, clocks


def _redis(config: Config, clocks: dict[str, float]) -> str | Unknown:
    """Try the redis-server that the run would start, and say which it is. If the site has
    one, ask that instead."""
    from elastic.local.master import redis_server

    if config.run.mode == "sync":
        return Unknown("sync mode has none")
    if config.redis.url:
        return _ask_site(config.redis.url, clocks)
    path = redis_server.find(config.redis.server)
    version = ".".join(map(str, redis_server.version(path)))
    with tempfile.TemporaryDirectory(prefix="elastic-doctor-") as folder:
        over_tls = redis_server.trial(config, Path(folder))
    return f"{version}, {path}, {'over TLS' if over_tls else 'without TLS'}"


def _ask_site(url: str, clocks: dict[str, float]) -> str:
    from elastic.local.store import Store

    store = Store.connect(Endpoint("", 0, 0, url), "", "doctor")
    before = time.time()
    clocks["redis"] = off_s(store.now(), before, time.time())
    store.close()
    return f"the site's, at {store.where}, answers"


def _network(config: Config, *, nodes) -> dict[str, Any]:
    """The address that a master would listen on, and the interface that leads to its
    node."""
    wanted = {*config.slurm.master_partition.split(",")}
    fit = (node.address for node in known(nodes, []) if wanted & {"", node.partition})
    address = network.bind_address(config.redis.bind, next(fit, "127.0.0.1"))
    names = {each: name for name, each in network.interfaces().items()}
    routed = ""
    with contextlib.suppress(ElasticError):  # no route: a machine by itself
        routed = names.get(network.routed("" if address.startswith("127.") else address), "")
    name = names.get(address, "")
    return {"address": address, "interface": name, "up": not name or network.is_up(name),
            "routed": routed}


def _written_off_s(folder: Path) -> float:
    before = time.time()
    (folder / "clock").write_bytes(b"")
    return off_s((folder / "clock").stat().st_mtime, before, time.time())


def off_s(seen: float, before: float, after: float, within_s: float = 0.0) -> float:
    """Seconds by which another clock is ahead. It said `seen`, or up to `within_s` more,
    while this one went from `before` to `after`."""
    return seen - after if seen > after else min(0.0, seen + within_s - before)


# ---- Python, cron


def _torch() -> dict[str, Any]:
    """What the child that imports torch says."""
    argv = [sys.executable, "-P", "-m", "elastic.people.doctor"]
    try:
        done = subprocess.run(argv, capture_output=True, errors="replace", timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        why = f"importing torch takes more than {TORCH_TIMEOUT_S:g} s"
        raise ElasticError(why, "put the venv on a faster filesystem") from None
    if done.returncode:
        why = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
        raise ElasticError(why, f"try {sys.executable} -c 'import torch'")
    return json.loads(done.stdout.splitlines()[-1])  # a site's Python may greet


def _save(config: Config, path, overrides, torch) -> estimate.Save | Unknown:
    """What a save of the run's model writes; zero bytes if no run was named."""
    if not path:
        return estimate.Save(0, 0)
    if config.run.command:
        return Unknown("only run.command knows its model")
    model, reason = submission.described(path, overrides)
    return estimate.save_of(model, config) if model else Unknown(reason)


def _cron(*, cluster) -> str | None:
    """The user's crontab and scrontab; None if neither can be listed."""
    tables, is_known = "", False
    for program in ("crontab",) if isinstance(cluster, Unknown) else ("crontab", "scrontab"):
        with contextlib.suppress(ElasticError):
            answer = sched_slurm.slurm_command((program, "-l"))
            is_known |= answer.returncode == 0 or "no crontab" in answer.stderr
            tables += answer.stdout if answer.returncode == 0 else ""
    return tables if is_known else None


# Each may use facts that those before it have found. A probe that needs the cluster is
# left out if that is Unknown: one wait for a silent Slurm is enough.
PROBES: dict[str, Callable] = {
    "cluster": _cluster,
    "partitions": lambda cluster: sched_slurm.partitions(),
    "nodes": lambda cluster: sched_slurm.nodes(),
    "limits": _limits,
    "qos": _qos,
    "disk": _disk,
    "redis": _redis,
    "network": _network,
    "torch": _torch,
    "save": _save,
    "cron": _cron,
}
VITAL = ("cluster", "disk", "redis", "torch", "tried")  # without which no run works


# ---- the child that imports torch


def _look_with_torch() -> dict[str, Any]:
    began, waited_s = time.perf_counter(), _waited_s()
    import torch

    import_s = time.perf_counter() - began - (_waited_s() - waited_s)
    from elastic.train.health import examine_gpu

    gpus = torch.cuda.device_count()
    examined = [examine_gpu(f"cuda:{index}") for index in range(gpus)]
    return {
        "python": sys.version.split()[0], "version": torch.__version__,
        "import_s": import_s, "gpus": gpus,
        "unfit": not all(is_fit for _, is_fit in examined),
        "problems": [problem for problems, _ in examined for problem in problems],
    }


def _waited_s() -> float:
    """Seconds that this process has waited for a CPU: a busy login node must not look
    like a slow filesystem."""
    return int((proc.read("/proc/self/schedstat").split() or [0, 0])[1]) / 1e9


if __name__ == "__main__":
    print(json.dumps(_look_with_torch()))
