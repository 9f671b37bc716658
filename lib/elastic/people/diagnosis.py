"""What the doctor makes of what it saw: facts in, one finding per check out. Pure.

    OK      as it should be; a good cluster gets nothing else
    WARN    runs work, but less well than they could
    FAIL    runs do not start here, or lose work whenever they are preempted
    SKIP    nobody could look: a fact is Unknown (FAIL, if no run works without that fact)
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

from elastic.base.units import size
from elastic.run.records import gpus_of
from elastic.run.wording import counted

OK, WARN, FAIL, SKIP = VERDICTS = ("OK", "WARN", "FAIL", "SKIP")
OLDEST_SLURM = (22, 5)
NOTICE_MARGIN_S = 1.0  # GraceTime has been seen half a second short
CRED_EXPIRE_S = 120  # Slurm's default; a requeued job waits as long
LONG_REQUEUE_S = 30.0
LONG_ENOUGH_S = 12 * 3600.0  # a time limit that costs little: each start takes a minute
SLOW_DISK = 10e6  # bytes/s
SLOW_IMPORT_S = 10.0
SLOW_START_S = 60.0  # from the start of a job to that of its ranks
STALE_S = 5.0  # until a file of one node is seen on another
SLOW_END_S = 10.0  # until none of a killed step is left
# NTP keeps clocks within milliseconds. The pass acts on differences of 30 s (backoff,
# reconcile_interval), and munge refuses everybody at 300 s.
SKEWED_S, WRONG_S = 1.0, 30.0
TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE|Partition_Limit")
OF_ONE_MACHINE = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")
_UNFIT = ("down", "drain", "fail", "error", "unknown", "inval", "maint", "future", "not_resp")


class Unknown(NamedTuple):
    """In place of a fact: why nobody knows it, and the way out. `meant`: it does not
    matter here, so its absence is never a FAIL."""

    why: str
    fix: str = ""
    meant: bool = False


class Finding(NamedTuple):
    """One line of the doctor's. `why`: it matters; `fix`: what to do."""

    check: str
    verdict: str
    seen: str
    why: str
    fix: str


@dataclass(frozen=True)
class Disk:
    """What was found in the folder of runs."""

    folder: str
    kind: str  # as in /proc/mounts
    shortage: str  # "" if there is room
    faults: tuple[str, ...]  # of rename, link and fsync
    free_bytes: float
    write: float  # bytes/s
    read: float


class Check(NamedTuple):
    """`judge` gets the facts that its parameters name, and returns (verdict, seen, fix).
    It is not called if one of them is Unknown, unless that parameter is keyword-only. An
    Unknown `vital` fact is a FAIL."""

    name: str
    why: str
    judge: Callable[..., tuple[str, str, str]]
    vital: str = ""


def diagnose(facts: Mapping[str, Any]) -> list[Finding]:
    """One finding per check, in order. An Unknown fact is told once, by the first check
    that needs it; the others that need it are left out."""
    findings: dict[int, Finding] = {}
    for at, check in enumerate(CHECKS + (TRIED if "tried" in facts else ())):
        needs = signature(check.judge).parameters.values()
        needed = [facts[need.name] for need in needs if need.kind is not need.KEYWORD_ONLY]
        missing = next((fact for fact in needed if isinstance(fact, Unknown)), None)
        findings.setdefault(id(missing) if missing else at, _finding(check, facts, missing))
    return list(findings.values())


def _finding(check: Check, facts: Mapping[str, Any], missing: Unknown | None) -> Finding:
    if missing:
        is_vital = facts.get(check.vital) is missing and not missing.meant
        return Finding(check.name, FAIL if is_vital else SKIP, missing.why, check.why, missing.fix)
    try:
        needs = {name: facts[name] for name in signature(check.judge).parameters}
        verdict, seen, fix = check.judge(**needs)
    except (ValueError, KeyError, IndexError) as error:  # an answer in words that are not known
        verdict, seen, fix = SKIP, f"not understood: {type(error).__name__}: {error}", ""
    return Finding(check.name, verdict, seen, check.why, fix)


def _warn_if(could_be_better: bool, seen: str, fix: str) -> tuple[str, str, str]:
    return (WARN, seen, fix) if could_be_better else (OK, seen, "")


# ---- Slurm --------------------------------------------------------------------------------------


def _slurm(cluster: Mapping[str, str]) -> tuple[str, str, str]:
    version = cluster["SLURM_VERSION"]
    is_old = [int(part) for part in version.split(".")[:2]] < [*OLDEST_SLURM]
    seen = f"{version}, cluster {cluster['ClusterName']}"
    return _warn_if(is_old, seen, "22.05 is the oldest that this was tried with")


def _workers_partition(config, partitions, nodes) -> tuple[str, str, str]:
    slurm, names = config.slurm, config.slurm.partition.split(",")
    problems = [_closed(name, "slurm.partition", partitions, nodes) for name in names]
    if all(problems) or not partitions.keys() >= {*names}:
        return next(filter(None, problems))
    inside = {node.name: node for node in nodes if node.partition in names}.values()
    counts = [gpus_of(node.gres, slurm.gres) for node in inside]
    seen = f"{slurm.partition}: UP, {counted(len(inside), 'node')}, {sum(counts)} GPUs"
    seen += _away(node.state for node in inside)
    per_job = slurm.gpus_per_worker if config.run.mode == "local" else slurm.gpus_per_node
    if slurm.gres and max(counts) < per_job:
        fit = sorted({n.partition for n in nodes if gpus_of(n.gres, "gpu") >= per_job})
        there = f"nodes with {per_job} GPUs are in: {', '.join(fit) or 'no partition'}"
        return FAIL, f"{seen}; no node with {slurm.gres}:{per_job}", f"set slurm.partition; {there}"
    if slurm.gres and sum(counts) < config.elastic.max:
        return WARN, f"{seen}; elastic.max is {config.elastic.max}", "lower elastic.max"
    whole = next(filter(None, (_gives_whole_nodes(partitions[name]) for name in names)), "")
    if whole and slurm.gres and per_job < max(counts):
        way_out = f"set slurm.gpus_per_worker (gpus_per_node in sync mode) to {max(counts)}"
        return WARN, f"{seen}; {whole}: a job gets whole nodes", way_out
    return OK, seen, ""


def _gives_whole_nodes(partition: Mapping[str, str]) -> str:
    """The setting that says so, by its name before and since Slurm 25.05; or ""."""
    words = {"OverSubscribe": "EXCLUSIVE", "Exclusive": "NODE"}.items()
    return next((f"{name}={value}" for name, value in words if partition.get(name) == value), "")


def _away(states: Iterable[str]) -> str:
    """How many nodes no job can use now, by their states: ", 2 drained, 1 powered
    down"."""
    words = ("powered down" if state.endswith("~") else state.rstrip("*") for state in states)
    counts = Counter(word for word in words if word.startswith((*_UNFIT, "powered", "reserved")))
    return "".join(f", {count} {word}" for word, count in sorted(counts.items()))


def _masters_partition(config, cluster, partitions, nodes) -> tuple[str, str, str]:
    if config.run.mode == "sync":
        return SKIP, "sync mode has no master", ""
    name = config.slurm.master_partition
    if problem := _closed(name, "slurm.master_partition", partitions, nodes):
        return problem
    mode = preempt_mode(cluster, name, partitions, nodes)
    seen = f"{name}: UP, {counted(sum(node.partition == name for node in nodes), 'node')}"
    if mode not in ("OFF", ""):
        return WARN, f"{seen}; PreemptMode={mode}", "set slurm.master_partition to a CPU partition"
    return OK, seen, ""


def _closed(name: str, key: str, partitions, nodes) -> tuple[str, str, str] | None:
    """The finding on a partition in which no job can run; None if jobs can run."""
    if name not in partitions:
        there = f"there are {', '.join(partitions)}"
        return FAIL, f"no partition {name}" if name else f"{key} is not set", f"set {key}: {there}"
    state = partitions[name]["State"]
    if state != "UP":
        return FAIL, f"{name}: {state}", f"wait for it, or set {key} to another"
    states = [node.state for node in nodes if node.partition == name]
    if all(state.startswith(_UNFIT) for state in states):
        seen = f"{name}: none of {len(states)} nodes is up ({', '.join(sorted(set(states)))})"
        return FAIL, seen, f"see sinfo -R, or set {key} to another"
    return None


def _time(config, partitions) -> tuple[str, str, str]:
    slurm, seen, short, brief = config.slurm, [], [], []
    kinds = [("time", slurm.partition.split(",")[0]), ("master_time", slurm.master_partition)]
    for key, name in kinds[: 1 if config.run.mode == "sync" else 2]:
        wanted, partition = getattr(slurm, key), partitions.get(name, {})
        most, usual = partition.get("MaxTime", "UNLIMITED"), partition.get("DefaultTime", "NONE")
        seen.append(f"{name}: MaxTime={most}" + (f", slurm.{key} = {wanted}" if wanted else ""))
        if wanted and not TIME.fullmatch(wanted):
            short.append(f"slurm.{key} = {wanted!r} is no time to Slurm: minutes, H:M:S, D-H")
        elif wanted and limit_s(wanted) > limit_s(most):
            short.append(f"lower slurm.{key} to {most}")
        elif not wanted and limit_s(usual) < min(limit_s(most), LONG_ENOUGH_S):
            seen[-1] += f", DefaultTime={usual}"
            brief.append(f"set slurm.{key}: without it every job ends after {usual}")
    return FAIL if short else WARN if brief else OK, "; ".join(seen), "; ".join(short + brief)


def limit_s(text: str) -> float:
    """A time limit as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S,
    UNLIMITED."""
    if not text[0].isdigit():
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# ---- preemption ---------------------------------------------------------------------------------


MODIFIERS = ("GANG", "PRIORITY", "WITHIN")  # stand beside the mode in PreemptMode


def preempt_mode(cluster: Mapping[str, str], name: str, partitions, nodes) -> str:
    """What happens to a job in the partition when it is preempted; "" where its QOS
    decides.

    Where the partition decides, only a partition of a higher tier on the same nodes
    preempts it.
    """
    kind, partition = cluster["PreemptType"], partitions[name]
    if kind == "preempt/qos":
        return ""
    if kind == "preempt/none" or not _is_below_another(name, partitions, nodes):
        return "OFF"
    modes = [mode for mode in partition["PreemptMode"].split(",") if mode not in MODIFIERS]
    return modes[0] if modes else "OFF"


def _is_below_another(name: str, partitions, nodes) -> bool:
    """Is there a partition of a higher PriorityTier on its nodes? True, if nobody
    knows."""
    tier = partitions[name].get("PriorityTier")
    if tier is None or isinstance(nodes, Unknown):
        return True
    mine = {node.name for node in nodes if node.partition == name}
    others = {node.partition for node in nodes if node.name in mine}
    return any(int(partitions[other].get("PriorityTier", 0)) > int(tier)
               for other in others if other in partitions)  # fmt: skip


_BY_QOS = "PreemptType=preempt/qos: mode and GraceTime are those of the job's QOS"
_SEE_QOS = "look: sacctmgr show qos format=Name,PreemptMode,GraceTime; wanted: REQUEUE, 30 s"


def _mode(config, cluster, partitions, *, nodes, qos) -> tuple[str, str, str]:
    name = config.slurm.partition.split(",")[0]
    if name not in partitions:
        return SKIP, f"no partition {name}", ""
    mode = preempt_mode(cluster, name, partitions, nodes)
    if not mode and isinstance(qos, Unknown):
        return SKIP, f"{_BY_QOS}; {qos.why}", _SEE_QOS
    if not mode:
        name, mode = f"QOS {qos['Name']}", qos["PreemptMode"].upper()
        mode = cluster["PreemptMode"] if mode == "CLUSTER" else mode
    seen = f"{name}: {mode} ({cluster['PreemptType']})"
    verdict, fix = {
        "REQUEUE": (OK, ""),
        "CANCEL": (WARN, f"runs go on: their jobs are submitted again, if elastic-reconcile is in a"
                         f" crontab. For jobs of your own: PreemptMode=REQUEUE for {name}"),
        "OFF": (WARN, "nothing is ever taken here: if another partition is the preemptible one, set"
                      f" slurm.partition; if this is it: PreemptMode=REQUEUE for {name}"),
    }.get(mode, (FAIL, f"PreemptMode=REQUEUE for {name}: a stopped job gets no notice, looks lost,"
                       " and keeps its GPUs' memory"))  # fmt: skip
    return verdict, seen, fix


def _notice(config, cluster, partitions, *, nodes, disk, save, qos) -> tuple[str, str, str]:
    name = config.slurm.partition.split(",")[0]
    mode = preempt_mode(cluster, name, partitions, nodes) if name in partitions else "OFF"
    if mode == "OFF":
        return SKIP, "nothing is preempted there", ""
    if not mode and isinstance(qos, Unknown):
        return SKIP, f"{_BY_QOS}; {qos.why}", _SEE_QOS
    wait = re.search(r"\d+", cluster["KillWait"])
    kill_s = int(wait[0]) if wait else 0
    grace_s = int(partitions[name]["GraceTime"]) if mode else round(limit_s(qos["GraceTime"]))
    name = name if mode else f"QOS {qos['Name']}"
    notice_s = grace_s + kill_s - NOTICE_MARGIN_S
    seen = f"{notice_s:g} s (GraceTime={grace_s}, KillWait={kill_s})"
    for missing in (disk, save):
        if isinstance(missing, Unknown):
            return OK, f"{seen}; what a save takes is not known: {missing.why}", ""
    if not save.whole_bytes:
        return OK, f"{seen}, for {size(notice_s * disk.write)} at {size(disk.write)}/s", ""
    whole_s, work_s = save.whole_bytes / disk.write, save.work_bytes / disk.write
    part = f" ({work_s:.2g} s for what counts)" if work_s < whole_s else ""
    seen += f"; a save takes {whole_s:.2g} s{part}: "
    seen += f"{size(save.whole_bytes)} at {size(disk.write)}/s"
    if 2 * whole_s <= notice_s:
        return OK, seen, ""
    least_s = math.ceil(2 * whole_s + NOTICE_MARGIN_S - kill_s)
    fix = f"GraceTime={least_s} for {name}, or a faster filesystem"
    return FAIL if work_s > notice_s else WARN, seen, fix


_NOTHING = (None, "", "(null)", "UNLIMITED", "NONE", "0")  # as Slurm writes what is not set


def _habits(config, cluster, partitions) -> tuple[str, str, str]:
    """What this site does to every job, of which nothing is wrong."""
    first = partitions.get(config.slurm.partition.split(",")[0], {})
    scripts = {name: cluster.get(f"{name}[0]", cluster.get(name))  # from 24.11 on there are several
               for name in ("Prolog", "Epilog")}  # fmt: skip
    told = {"submit plugins": cluster.get("JobSubmitPlugins"), **scripts,
            "per job": first.get("JobDefaults"),
            "DefMemPerCPU": first.get("DefMemPerCPU"), "DefMemPerNode": first.get("DefMemPerNode"),
            "MaxBatchRequeue": cluster.get("MaxBatchRequeue")}  # fmt: skip
    known = {name: value for name, value in told.items() if value not in _NOTHING}
    return OK, "; ".join(f"{name} {value}" for name, value in known.items()) or "none", ""


def _job_requeue(cluster) -> tuple[str, str, str]:
    setting = cluster["JobRequeue"]
    fix = "give sbatch --requeue, or set JobRequeue=1. Runs do not need it"
    return _warn_if(setting == "0", f"JobRequeue={setting}", fix)


def _requeue_delay(cluster) -> tuple[str, str, str]:
    delay_s = _delay_s(cluster)
    if _expedites(cluster):
        return OK, f"{delay_s} s; none for jobs of --requeue=expedite", ""
    fix = ("AuthInfo=cred_expire=10 and a restart of slurmctld, or scontrol update JobId=ID"
           " StartTime=now each time. Runs do not wait: their jobs are submitted anew")  # fmt: skip
    return _warn_if(delay_s > LONG_REQUEUE_S, f"{delay_s} s", fix)


def _delay_s(cluster: Mapping[str, str]) -> int:
    """Seconds that a requeued job waits at least."""
    delay = re.search(r"\brequeue_delay=(\d+)", cluster.get("SchedulerParameters", ""))
    delay = delay or re.search(r"\bcred_expire=(\d+)", cluster.get("AuthInfo", ""))
    return 1 + (int(delay[1]) if delay else CRED_EXPIRE_S)


def _expedites(cluster: Mapping[str, str]) -> bool:
    """May jobs of --requeue=expedite come back at once? From Slurm 25.11 on."""
    return "enable_expedited_requeue" in cluster.get("SlurmctldParameters", "")


# ---- limits -------------------------------------------------------------------------------------


def _limits(config, cluster, *, limits) -> tuple[str, str, str]:
    most, fewest = wanted_jobs(config)
    known = {} if isinstance(limits, Unknown) else limits
    enforced = {"limits", "safe", "all"} & {*cluster["AccountingStorageEnforce"].split(",")}
    if config.run.mode == "sync":  # of the two only one runs
        known = {name: limit for name, limit in known.items() if "Submit" in name}
    every = {"MaxJobCount of the cluster": int(cluster["MaxJobCount"])}
    every |= known if enforced else {}
    name, limit = min(every.items(), key=lambda item: item[1])
    if limit < most:
        fix = f"ask for {most}, or lower elastic.max (and min) to what fits"
        seen = f"{name} is {limit}, the run has up to {most} jobs"
        return FAIL if limit < fewest else WARN, seen, fix
    if isinstance(limits, Unknown):
        return SKIP, limits.why, limits.fix
    return OK, f"{name} is {limit}, {most} jobs are wanted" if enforced else "not enforced", ""


def wanted_jobs(config) -> tuple[int, int]:
    """The jobs of a run at its largest, and the fewest with which it has `elastic.min`
    GPUs."""
    if config.run.mode == "sync":
        return 2, 1  # one, and its successor behind it
    per_worker = config.slurm.gpus_per_worker
    return 1 + config.elastic.max // per_worker, 1 + math.ceil(config.elastic.min / per_worker)


# ---- files, Redis, network ----------------------------------------------------------------------


def _folder(disk: Disk) -> tuple[str, str, str]:
    if disk.faults:
        return FAIL, f"{disk.folder}: {'; '.join(disk.faults)}", "set ELASTIC_RUNS to another"
    if disk.shortage:
        return FAIL, disk.shortage, "make room, or set ELASTIC_RUNS to another filesystem"
    return OK, f"{disk.folder}: rename, link, fsync work; {size(disk.free_bytes)} free", ""


def _shared(config, disk: Disk, here: str, *, nodes) -> tuple[str, str, str]:
    others = other_hosts(config, nodes, here)
    if disk.kind in OF_ONE_MACHINE and others:
        seen = f"{disk.kind}, which {others[0]} and {len(others) - 1} others may not see"
        return WARN, seen, "set ELASTIC_RUNS to a folder on the shared filesystem"
    return OK, disk.kind, ""


def other_hosts(config, nodes, here: str) -> list[str]:
    """The machines, without this one, that the run's jobs may be on."""
    if isinstance(nodes, Unknown):
        return []
    ours = {*config.slurm.partition.split(","), config.slurm.master_partition}
    return sorted({n.host for n in nodes if n.partition in ours and n.host.split(".")[0] != here})


def _bandwidth(disk: Disk) -> tuple[str, str, str]:
    seen = f"writes {size(disk.write)}/s, reads {size(disk.read)}/s, one process"
    is_slow = min(disk.write, disk.read) < SLOW_DISK
    return _warn_if(is_slow, seen, "set ELASTIC_RUNS to a faster filesystem")


def _interface(config, network, here, *, nodes) -> tuple[str, str, str]:
    if trouble := network.get("trouble"):
        return WARN, f"{trouble.what}; the master's node may have it", trouble.hint
    seen = f"{config.redis.bind}: {network['address']}"
    seen += f" ({network['interface']})" if network["interface"] else ""
    if not network["up"]:
        return FAIL, f"{seen} is down", "set redis.bind to an interface that is up, or to auto"
    if network["address"].startswith("127.") and other_hosts(config, nodes, here):
        fix = f"set redis.bind to the interface that routes to them: {network['routed']}"
        return WARN, f"{seen}: other machines cannot reach it", fix
    return OK, seen, ""


def _clock(clocks: Mapping[str, float]) -> tuple[str, str, str]:
    seen = ", ".join(f"{name} {round(skew_s, 1) + 0.0:+} s" for name, skew_s in clocks.items())
    if not clocks:
        return SKIP, "nobody else's clock is known", ""
    worst_s, fix = max(map(abs, clocks.values())), "run NTP (chrony) on all of them"
    return (FAIL, seen, fix) if worst_s > WRONG_S else _warn_if(worst_s > SKEWED_S, seen, fix)


# ---- Python, GPUs, cron -------------------------------------------------------------------------


def _torch(torch: Mapping[str, Any]) -> tuple[str, str, str]:
    version, import_s = torch["version"], torch["import_s"]
    seen = f"Python {torch['python']}; torch {version}, imported in {import_s:.1f} s"
    fix = "put the venv on a faster filesystem, and see ELASTIC_PYTHON"
    return _warn_if(import_s > SLOW_IMPORT_S, seen, fix)


def _gpus(torch: Mapping[str, Any]) -> tuple[str, str, str]:
    if not torch["gpus"]:
        return SKIP, "torch sees no GPU here", "on a node: srun --gres=gpu:1 elastic-doctor"
    if torch["problems"]:
        verdict = FAIL if torch["unfit"] else WARN
        return verdict, "; ".join(torch["problems"]), "keep jobs away from the node: slurm.exclude"
    return OK, f"{torch['gpus']} compute rightly, and report no memory errors", ""


def _cron(config, cron: str | None, cron_line: str, *, partitions) -> tuple[str, str, str]:
    if cron and re.search(r"(?m)^[^#\n]*elastic[- ]reconcile", cron):
        return OK, "elastic-reconcile is in the crontab", ""
    none = "there is no crontab and no scrontab here"
    seen = none if cron is None else "elastic-reconcile is not in the crontab"
    fix = f"where runs are submitted from, crontab -e: {cron_line}"
    known = {} if isinstance(partitions, Unknown) else partitions
    ours = [*config.slurm.partition.split(","), config.slurm.master_partition]
    hosts = {known.get(name, {}).get("AllocNodes", "ALL") for name in ours} - {"ALL"}
    if hosts:
        return FAIL, f"{seen}, and only {hosts.pop()} may submit jobs (AllocNodes)", fix
    return WARN, seen, fix


CHECKS = (
    Check("slurm", "without it nothing can be submitted", _slurm, "cluster"),
    Check("partition", "workers and trainers run there", _workers_partition),
    Check("master partition", "rounds stand still while the master is away", _masters_partition),
    Check("habits", "what this site does to every job", _habits),
    Check("time limit", "a job that asks for more never starts", _time),
    Check("preemption", "what becomes of a job whose GPUs are taken", _mode),
    Check("notice", "what is not saved before the kill is lost", _notice),
    Check("job requeue", "whether sbatch scripts of your own come back", _job_requeue),
    Check("requeue delay", "a job that Slurm requeues waits so long", _requeue_delay),
    Check("limits", "a run gets no more GPUs than it may have jobs", _limits),
    Check("run folder", "it is the durable truth of a run", _folder, "disk"),
    Check("filesystem", "all jobs of a run work in one folder", _shared),
    Check("bandwidth", "saves, versions and deltas wait for it", _bandwidth),
    Check("redis", "workers and master find each other there", lambda redis: (OK, redis, ""),
          "redis"),
    Check("interface", "the master listens there for its workers", _interface, "network"),
    Check("clock", "jobs, Slurm and the pass compare times that each other wrote", _clock),
    Check("torch", "every start of a worker waits for its import", _torch, "torch"),
    Check("gpus", "one that computes wrongly spoils the run", _gpus),
    Check("cron", "only its pass replaces jobs when no master does", _cron),
)


# ---- a job that was tried (tryout.py) -----------------------------------------------------------


def _tried(words: str, *problems: tuple[Callable, str, str]) -> Callable:
    """A judge with these words. A problem is (is it there?, verdict, fix), and the first
    one that is there decides."""

    def judge(tried) -> tuple[str, str, str]:
        verdict, fix = next(((v, fix) for is_so, v, fix in problems if is_so(tried)), (OK, ""))
        return verdict, words.format(**tried), fix

    return judge


TRIED = (
    Check("try job", "the jobs of runs are submitted and started so", _tried(
        "2 nodes after {waited_s:.0f} s, their ranks {startup_s:.0f} s later",
        (lambda t: t["startup_s"] > SLOW_START_S, WARN, "see prologs, and the disk")), "tried"),
    Check("try ranks", "a rank can use no more than it sees", _tried(
        "{ranks[0][view]}; {ranks[3][view]}",
        (lambda t: any(rank["gpus"] < rank["given_gpus"] for rank in t["ranks"]), FAIL,
         "every rank must see all GPUs of its node: see slurm.options, slurm.srun_options"),
        (lambda t: any(rank["cores"] < rank["given_cores"] for rank in t["ranks"]), WARN,
         "they are bound to fewer cores than Slurm gave: see slurm.srun_options"))),
    Check("try train", "ranks meet, and exchange gradients in every step", _tried(
        "{trained} of 4 ranks train together: {how}",
        (lambda t: t["trained"] < 4, FAIL, "see sync.bind, and set NCCL_DEBUG=INFO"))),
    Check("try files", "the jobs of a run meet in one folder", _tried(
        "{seen[0]} of 4 ranks see a file after {seen[1]:.1f} s; {locks} of 3 find one locked",
        (lambda t: t["seen"][0] < 4, FAIL, "set ELASTIC_RUNS to a shared filesystem"),
        (lambda t: t["seen"][1] > STALE_S, WARN, "mount it with actimeo=1 (NFS)"),
        (lambda t: t["locks"] < 3, WARN, "two passes may submit a job twice: mount with flock"))),
    Check("try kill", "the launcher starts ranks again when one dies", _tried(
        "srun tells {killed[0]} of 1 death within {killed[1]:.1f} s; steps end in {ended_s:.1f} s",
        (lambda t: not t["killed"][0], FAIL, "it must say so in words that launch.py knows"),
        (lambda t: t["ended_s"] > SLOW_END_S, WARN, "new ranks may meet old ones on their GPUs"))),
    Check("try notice", "what is not saved before the kill is lost", _tried(
        "{told[0]} of 3 ranks hear TERM within {told[1]:.1f} s; srun and batch script {lives};"
        " {saved[0]} of 4 that train save their last step within {saved[1]:.1f} s",
        (lambda t: t["told"][0] < 3, FAIL, "TERM must get to every rank: see slurm.rank_prefix"),
        (lambda t: t["lives"] != "live on", FAIL, "srun must not end at a notice to its step"),
        (lambda t: t["saved"][0] < t["trained"], FAIL, "what was trained is lost: see the logs"))),
    Check("try shrink", "a job that loses a node goes on with the others", _tried(
        "{shrunk}", (lambda t: t["is_stuck"], WARN, "without it such a job ends, and waits"))),
)  # fmt: skip


# ---- what a site file should say ----------------------------------------------------------------


def propose(facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """("section.key", value, where it comes from) for a site file."""
    proposals = []
    if worker := _best_partition(facts, with_gpus=True):
        proposals.append(("slurm.partition", *worker))
    if master := _best_partition(facts, with_gpus=False):
        proposals.append(("slurm.master_partition", *master))
    if not isinstance(facts["server"], Unknown):
        proposals.append(("redis.server", facts["server"], "found here"))
    network, others = facts["network"], {n.host.split(".")[0] for n in facts["nodes"]}
    is_hidden = not isinstance(network, Unknown) and network["address"].startswith("127.")
    if is_hidden and network["routed"] and others - {facts["here"]}:
        proposals.append(("redis.bind", network["routed"], "leads to other machines from here"))
    cluster = facts["cluster"]
    why = "--requeue=expedite" if _expedites(cluster) else "AuthInfo and SchedulerParameters"
    delay_s = 1 if _expedites(cluster) else _delay_s(cluster)
    return [*proposals, ("plan.requeue", f"{delay_s}s", f"what a requeued job waits here: {why}")]


def _best_partition(facts: Mapping[str, Any], with_gpus: bool) -> tuple[str, str] | None:
    """(name, what it is like): for workers the partition with the most GPUs that are
    preempted, for masters one that is not preempted, preferably without GPUs."""
    best = []
    for name, partition in facts["partitions"].items():
        inside = [node for node in facts["nodes"] if node.partition == name]
        gpus = sum(gpus_of(node.gres, "gpu") for node in inside)
        mode = preempt_mode(facts["cluster"], name, facts["partitions"], facts["nodes"])
        is_fit = gpus and mode in ("REQUEUE", "CANCEL") if with_gpus else inside and mode == "OFF"
        if is_fit and partition["State"] == "UP":
            order = (mode == "REQUEUE", gpus) if with_gpus else (not gpus, len(inside))
            what = f"PreemptMode={mode}, {counted(len(inside), 'node')}, {gpus} GPUs"
            best.append((order, name, what))
    return max(best)[1:] if best else None
