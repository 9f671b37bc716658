"""What the doctor makes of what it saw: facts in, one finding per check out. Pure.

    OK      as it should be; a good cluster gets nothing else
    WARN    runs work, but less well than they could
    FAIL    runs do not start here, or lose work whenever they are preempted
    SKIP    a fact is Unknown (FAIL instead, if no run works without that fact)
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

from elastic.base.errors import ElasticError
from elastic.base.units import NOTICE_MARGIN_S, size
from elastic.jobs.slurm_text import gpus_of, most_gpus
from elastic.run.wording import counted

OK, WARN, FAIL, SKIP = VERDICTS = ("OK", "WARN", "FAIL", "SKIP")
OLDEST_SLURM = (22, 5)
CRED_EXPIRE_S = 120  # Slurm's default; a requeued job waits as long
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
_UNFIT = ("down", "drain", "fail", "error", "unknown", "inval", "maint", "future",
          "not_resp")


class Unknown(NamedTuple):
    """Stands for a fact that is not known: why, the way out, and the verdict on that."""

    why: str
    fix: str = ""
    verdict: str = SKIP  # FAIL: no run works without the fact


def known(fact: Any, otherwise: Any) -> Any:
    """The fact, or `otherwise` if it is Unknown."""
    return otherwise if isinstance(fact, Unknown) else fact


class Finding(NamedTuple):
    """One line of the doctor's. `why` the check matters; `fix`: what to do."""

    check: str
    verdict: str
    seen: str
    why: str
    fix: str


class Disk(NamedTuple):
    """What the doctor found in the folder of runs."""

    folder: str
    kind: str  # as in /proc/mounts
    shortage: str  # "" if there is room
    faults: tuple[str, ...]  # of rename, link and fsync
    free_bytes: float
    write: float  # bytes/s, of one process


Judgement = tuple[str, str, str]  # verdict, seen, fix


class Check(NamedTuple):
    """`judge` gets the facts that its parameters name: see `answer`."""

    name: str
    why: str
    judge: Callable[..., Judgement]


def diagnose(facts: Mapping[str, Any]) -> list[Finding]:
    """One finding per check, in order. An Unknown fact is told once, by the first check
    that needs it; the others that need it are left out."""
    facts = dict(facts)
    for name, derive in DERIVED.items():
        facts[name] = answer(derive, facts)
    checks = CHECKS + (TRIED if "tried" in facts else ())
    answers = [answer(check.judge, facts) for check in checks]
    findings: dict[int, Finding] = {}
    for check, found in zip(checks, answers, strict=True):
        is_known = not isinstance(found, Unknown)
        verdict, seen, fix = found if is_known else (found.verdict, found.why, found.fix)
        findings.setdefault(id(found), Finding(check.name, verdict, seen, check.why, fix))
    return list(findings.values())


def answer(question: Callable[..., Any], facts: Mapping[str, Any], is_vital: bool = False) -> Any:
    """Call a probe, a derivation or a judge with the facts that its parameters name. If one
    of them is Unknown, the answer is that Unknown, without a call (keyword-only parameters
    may be Unknown). An error makes an Unknown, too: a FAIL if the question `is_vital`."""
    verdict = FAIL if is_vital else SKIP
    needs = signature(question).parameters
    needed = [facts[name] for name, need in needs.items() if need.kind is not need.KEYWORD_ONLY]
    if missing := next((fact for fact in needed if isinstance(fact, Unknown)), None):
        return missing
    try:
        return question(**{name: facts[name] for name in needs})
    except ElasticError as error:
        return Unknown(error.what, error.hint, verdict)
    except Exception as error:  # whatever is broken here, the other checks are wanted
        return Unknown(f"not known: {type(error).__name__}: {error}", verdict=verdict)


def judgement(seen: str, *problems: tuple[object, str, str, str]) -> Judgement:
    """OK, or the verdict of the first problem that is there. A problem is (is it there?,
    verdict, what else is seen, fix)."""
    for is_there, verdict, more, fix in problems:
        if is_there:
            return verdict, f"{seen}; {more}" if more else seen, fix
    return OK, seen, ""


# ---- Slurm ---------------------------------------------------------------------------


def _named(config, *, cluster, partitions, nodes) -> list[str] | Unknown:
    """The partitions of workers."""
    if names := config.slurm.partition:
        return names.split(",")
    modes = {name: preempt_mode(cluster, name, partitions, nodes)
             for name in known(partitions, ()) if not isinstance(cluster, Unknown)}
    there = ", ".join(f"{name} ({mode or 'as its QOS has it'})" for name, mode in modes.items())
    fix = f"set it in etc/site.toml or the run's file; how jobs are preempted: {there}"
    return Unknown("slurm.partition is not set", fix, FAIL)


def _slurm(cluster: Mapping[str, str]) -> Judgement:
    version = cluster["SLURM_VERSION"]
    is_old = [int(part) for part in version.split(".")[:2]] < [*OLDEST_SLURM]
    fix = "upgrade Slurm: 22.05 is the oldest that Elastic was tried with"
    return judgement(f"{version}, cluster {cluster['ClusterName']}", (is_old, WARN, "", fix))


def _workers_partition(config, partitions, nodes, named) -> Judgement:
    slurm = config.slurm
    closed = [_closed(name, "slurm.partition", partitions, nodes) for name in named]
    if all(closed) or not partitions.keys() >= {*named}:
        return next(filter(None, closed))
    inside = {node.name: node for node in nodes if node.partition in named}.values()
    counts = [gpus_of(node.gres, slurm.gres) for node in inside]
    most, wants_gpus = max(counts), bool(slurm.gres)
    is_local = config.run.mode == "local"
    per_job = slurm.gpus_per_worker if is_local else slurm.gpus_per_node
    fit = {node.partition for node in nodes if gpus_of(node.gres, "gpu") >= per_job}
    there = f"nodes with {per_job} GPUs are in: {', '.join(sorted(fit)) or 'no partition'}"
    whole = next(filter(None, (_gives_whole_nodes(partitions[name]) for name in named)), "")
    key = f"slurm.{'gpus_per_worker' if is_local else 'gpus_per_node'}"
    return judgement(
        f"{slurm.partition}: UP, {counted(len(inside), 'node')}, {sum(counts)} GPUs",
        (wants_gpus and most < per_job, FAIL, f"no node with {slurm.gres}:{per_job}",
         f"set slurm.partition; {there}"),
        (wants_gpus and sum(counts) < config.elastic.max, WARN,
         f"elastic.max is {config.elastic.max}", "lower elastic.max"),
        (wants_gpus and whole and per_job < most, WARN,
         f"{whole}: a job gets whole nodes", f"set {key} to {most}"),
    )


def _gives_whole_nodes(partition: Mapping[str, str]) -> str:
    """The setting by which jobs get whole nodes, or "". Slurm 25.05 has renamed it."""
    words = {"OverSubscribe": "EXCLUSIVE", "Exclusive": "NODE"}.items()
    return next((f"{name}={value}" for name, value in words if partition.get(name) == value), "")


def _masters_partition(config, cluster, partitions, nodes, named) -> Judgement:
    if config.run.mode == "sync":
        return SKIP, "sync mode has no master", ""
    names = config.slurm.master_partition.split(",")
    for name in names:
        if closed := _closed(name, "slurm.master_partition", partitions, nodes):
            return closed
    modes = {preempt_mode(cluster, name, partitions, nodes) for name in names} - {"OFF", ""}
    inside = {node.name for node in nodes if node.partition in names}
    seen = f"{','.join(names)}: UP, {counted(len(inside), 'node')}"
    by_qos = cluster["PreemptType"] == "preempt/qos"
    is_shared = by_qos and config.slurm.master_qos in ("", config.slurm.qos)
    fix = "set slurm.master_partition to a partition where nothing is preempted"
    return judgement(
        seen, (modes, WARN, f"PreemptMode={','.join(sorted(modes))}", fix),
        (is_shared, WARN, "the master has the workers' QOS, which decides (preempt/qos)",
         "set slurm.master_qos to one that nothing preempts"),
    )


def _closed(name: str, key: str, partitions, nodes) -> Judgement | None:
    """The finding on a partition in which no job can run; None if jobs can run."""
    if name not in partitions:
        return FAIL, f"no partition {name}", f"set {key}: there are {', '.join(partitions)}"
    state = partitions[name]["State"]
    if state != "UP":
        return FAIL, f"{name}: {state}", f"wait for it, or set {key} to another"
    states = [node.state for node in nodes if node.partition == name]
    if all(state.startswith(_UNFIT) for state in states):
        seen = f"{name}: none of {len(states)} nodes is up ({', '.join(sorted({*states}))})"
        return FAIL, seen, f"see sinfo -R, or set {key} to another"
    return None


def _time(config, partitions, named) -> Judgement:
    slurm, seen, short, brief = config.slurm, [], [], []
    kinds = [("time", name) for name in named]
    if config.run.mode == "local":
        kinds += [("master_time", name) for name in config.slurm.master_partition.split(",")]
    for key, name in kinds:
        wanted, partition = getattr(slurm, key), partitions.get(name, {})
        most, usual = partition.get("MaxTime", "UNLIMITED"), partition.get("DefaultTime", "NONE")
        seen.append(f"{name}: MaxTime={most}" + (f", slurm.{key} = {wanted}" if wanted else ""))
        if wanted and not TIME.fullmatch(wanted):
            short.append(f"write slurm.{key} = {wanted!r} as Slurm does: minutes, H:M:S, D-H")
        elif wanted and limit_s(wanted) > limit_s(most):
            short.append(f"lower slurm.{key} to {most}")
        elif not wanted and limit_s(usual) < min(limit_s(most), LONG_ENOUGH_S):
            seen[-1] += f", DefaultTime={usual}"
            brief.append(f"set slurm.{key}: without it every job ends after {usual}")
    fix = "; ".join(short + brief)
    return judgement("; ".join(seen), (short, FAIL, "", fix), (brief, WARN, "", fix))


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


# ---- preemption ----------------------------------------------------------------------


MODIFIERS = ("GANG", "PRIORITY", "WITHIN")  # words beside the mode in PreemptMode


def preempt_mode(cluster: Mapping[str, str], name: str, partitions, nodes) -> str:
    """What happens to a job in the partition when it is preempted; "" if its QOS decides.

    If the partition decides, only a partition of a higher tier on the same nodes preempts.
    """
    kind, partition = cluster["PreemptType"], partitions[name]
    if kind == "preempt/qos":
        return ""
    if kind == "preempt/none" or not _is_below_another(name, partitions, nodes):
        return "OFF"
    modes = [mode for mode in partition["PreemptMode"].split(",") if mode not in MODIFIERS]
    return modes[0] if modes else "OFF"


def _is_below_another(name: str, partitions, nodes) -> bool:
    """Is there a partition of a higher PriorityTier on its nodes? True if that is not
    known."""
    tier = partitions[name].get("PriorityTier")
    if tier is None or isinstance(nodes, Unknown):
        return True
    mine = {node.name for node in nodes if node.partition == name}
    others = {node.partition for node in nodes if node.name in mine} & partitions.keys()
    return any(int(partitions[other].get("PriorityTier", 0)) > int(tier) for other in others)


class Preemption(NamedTuple):
    """How jobs of the run are preempted. `decides`: the partition, or the QOS."""

    decides: str
    mode: str
    grace_s: int


def _preemption(cluster, partitions, named, *, nodes, qos) -> Preemption | Unknown:
    if (name := named[0]) not in partitions:
        return Unknown(f"no partition {name}")
    if mode := preempt_mode(cluster, name, partitions, nodes):
        return Preemption(name, mode, int(partitions[name]["GraceTime"]))
    if isinstance(qos, Unknown):
        seen = "PreemptType=preempt/qos: mode and GraceTime are those of the job's QOS"
        return Unknown(f"{seen}; {qos.why}", "look: sacctmgr show qos"
                       " format=Name,PreemptMode,GraceTime; wanted: REQUEUE, 30 s")
    mode, grace_s = qos["PreemptMode"].upper(), round(limit_s(qos["GraceTime"]))
    mode = cluster["PreemptMode"] if mode == "CLUSTER" else mode
    return Preemption(f"QOS {qos['Name']}", mode, grace_s)


def _mode(cluster, preemption: Preemption) -> Judgement:
    mode, fix = preemption.mode, f"PreemptMode=REQUEUE for {preemption.decides}"
    return judgement(
        f"{preemption.decides}: {mode} ({cluster['PreemptType']})",
        (mode == "CANCEL", WARN, "", "runs go on, as elastic-reconcile in a crontab"
         f" submits their jobs again. For jobs of your own: {fix}"),
        (mode == "OFF", WARN, "", "nothing is preempted here: if it is in another"
         f" partition, set slurm.partition; else {fix}"),
        (mode != "REQUEUE", FAIL, "", f"{fix}: a stopped job gets no notice, looks"
         " lost, and keeps its GPUs' memory"),
    )


def _notice(cluster, preemption: Preemption, *, disk, save) -> Judgement:
    if preemption.mode == "OFF":
        return SKIP, "nothing is preempted there", ""
    kill_s = int(cluster["KillWait"].split()[0])
    notice_s = preemption.grace_s + kill_s - NOTICE_MARGIN_S
    seen = f"{notice_s:g} s (GraceTime={preemption.grace_s}, KillWait={kill_s})"
    for missing in (disk, save):
        if isinstance(missing, Unknown):
            return OK, f"{seen}; what a save takes is not known: {missing.why}", ""
    speed = f"{size(disk.write)}/s"
    if not save.whole_bytes:
        return OK, f"{seen}, for {size(notice_s * disk.write)} at {speed}", ""
    whole_s, work_s = save.whole_bytes / disk.write, save.work_bytes / disk.write
    part = f" ({work_s:.2g} s for what counts)" if work_s < whole_s else ""
    least_s = math.ceil(2 * whole_s + NOTICE_MARGIN_S - kill_s)
    fix = f"GraceTime={least_s} for {preemption.decides}, or a faster filesystem"
    return judgement(
        f"{seen}; a save takes {whole_s:.2g} s{part}: {size(save.whole_bytes)} at {speed}",
        (work_s > notice_s, FAIL, "", fix),
        (2 * whole_s > notice_s, WARN, "", fix),
    )


_NOTHING = (None, "", "(null)", "UNLIMITED", "NONE", "0")  # what Slurm writes if not set


def _habits(config, cluster, partitions) -> Judgement:
    """What this site does to every job; always OK."""
    every = cluster | partitions.get(config.slurm.partition.split(",")[0], {})
    names = ("JobSubmitPlugins", "Prolog", "Epilog", "JobDefaults", "DefMemPerCPU",
             "DefMemPerNode", "MaxBatchRequeue")
    # From Slurm 24.11 on there may be several scripts: Prolog[0], Prolog[1].
    told = ((name, every.get(f"{name}[0]", every.get(name))) for name in names)
    known = [f"{name} {value}" for name, value in told if value not in _NOTHING]
    return OK, "; ".join([*known, f"a requeued job waits for {_delay_s(cluster)} s"]), ""


def _delay_s(cluster: Mapping[str, str]) -> int:
    """Seconds that a requeued job waits at least. (From Slurm 25.11 on a site may let
    jobs with --requeue=expedite come back at once.)"""
    if "enable_expedited_requeue" in cluster.get("SlurmctldParameters", ""):
        return 1
    delay = re.search(r"\brequeue_delay=(\d+)", cluster.get("SchedulerParameters", ""))
    delay = delay or re.search(r"\bcred_expire=(\d+)", cluster.get("AuthInfo", ""))
    return 1 + (int(delay[1]) if delay else CRED_EXPIRE_S)


# ---- limits --------------------------------------------------------------------------


def _limits(config, cluster, *, limits) -> Judgement | Unknown:
    wanted = {"jobs": wanted_jobs(config), "GPUs": (config.elastic.max, config.elastic.min)}
    every = [("MaxJobCount of the cluster", int(cluster["MaxJobCount"]), "jobs")]
    enforces = {"limits", "safe", "all"} & {*cluster["AccountingStorageEnforce"].split(",")}
    if enforces and not isinstance(limits, Unknown):
        every += _of_accounting(config, limits)
    name, limit, of = min(every, key=lambda each: each[1] / wanted[each[2]][0])
    most, fewest = wanted[of]
    if isinstance(limits, Unknown) and limit >= most:
        return limits
    fix = f"ask for {most}, or lower elastic.max (and min) to what fits"
    return judgement(f"{name} is {limit}, the run has up to {most} {of}",
                  (limit < fewest, FAIL, "", fix), (limit < most, WARN, "", fix))


def _of_accounting(config, owners: Mapping[str, Mapping[str, str]]) -> Iterator[tuple]:
    """Limits: ("MaxJobs of the account lab", how many, "jobs" or "GPUs")."""
    for owner, row in owners.items():
        for column, value in row.items():
            name, is_local = f"{column} of {owner}", config.run.mode == "local"
            if "TRES" in column:
                yield from ((name, n, "GPUs") for n in most_gpus(value, config.slurm.gres))
            # Sync mode has two jobs, of which one runs: limits on running jobs allow that.
            elif re.match("Max|Grp", column) and value and (is_local or "Submit" in column):
                yield name, int(value), "jobs"


def wanted_jobs(config) -> tuple[int, int]:
    """The jobs of a run at its largest, and the fewest with which it has `elastic.min`
    GPUs."""
    if config.run.mode == "sync":
        return 2, 1  # the trainer, and its successor behind it
    limits, per_worker = config.elastic, config.slurm.gpus_per_worker
    return 1 + config.workers(limits.max), 1 + math.ceil(limits.min / per_worker)


# ---- files, Redis, network -----------------------------------------------------------


def _folder(disk: Disk, others: Sequence[str]) -> Judgement:
    works = "; ".join(disk.faults) or "rename, link, fsync, flock work"
    return judgement(
        f"{disk.folder}: {disk.kind}; {works}; {size(disk.free_bytes)} free;"
        f" one process writes {size(disk.write)}/s",
        (disk.faults, FAIL, "", "set ELASTIC_RUNS to another folder"),
        (disk.shortage, FAIL, disk.shortage,
         "make room, or set ELASTIC_RUNS to another filesystem"),
        (disk.kind in OF_ONE_MACHINE and others, WARN,
         f"{' and '.join(others[:2])} may not see it",
         "set ELASTIC_RUNS to a folder on the shared filesystem"),
        (disk.write < SLOW_DISK, WARN, "", "set ELASTIC_RUNS to a faster filesystem"),
    )


def _others(config, here: str, *, nodes) -> list[str]:
    """The machines, without this one, that the run's jobs may be on."""
    ours = {*f"{config.slurm.partition},{config.slurm.master_partition}".split(",")}
    hosts = {node.host for node in known(nodes, []) if node.partition in ours}
    return sorted(host for host in hosts if host.split(".")[0] != here)


def _interface(config, others: Sequence[str], *, network) -> Judgement:
    if isinstance(network, Unknown):
        return judgement(network.why, (not others, FAIL, "", network.fix),
                      (True, WARN, "the master's node may have it", network.fix))
    seen = f"{config.redis.bind}: {network['address']}"
    seen += f" ({network['interface']})" if network["interface"] else ""
    is_hidden = network["address"].startswith("127.") and others
    return judgement(
        seen,
        (not network["up"], FAIL, "it is down",
         "set redis.bind to an interface that is up, or to auto"),
        (is_hidden, WARN, "other machines cannot reach it",
         f"set redis.bind to the interface that routes to them: {network['routed']}"),
    )


def _clock(clocks: Mapping[str, float]) -> Judgement:
    if not clocks:
        return SKIP, "nobody else's clock is known", ""
    seen = (f"{name} {round(skew_s, 1) + 0.0:+} s" for name, skew_s in clocks.items())
    worst_s, fix = max(map(abs, clocks.values())), "run NTP (chrony) on all of them"
    return judgement(", ".join(seen), (worst_s > WRONG_S, FAIL, "", fix),
                  (worst_s > SKEWED_S, WARN, "", fix))


# ---- Python, GPUs, cron --------------------------------------------------------------


def _torch(torch: Mapping[str, Any]) -> Judgement:
    version, import_s = torch["version"], torch["import_s"]
    fix = "put the venv on a faster filesystem, and see ELASTIC_PYTHON"
    return judgement(f"Python {torch['python']}; torch {version}, imported in {import_s:.1f} s",
                  (import_s > SLOW_IMPORT_S, WARN, "", fix))


def _gpus(torch: Mapping[str, Any]) -> Judgement:
    if not torch["gpus"]:
        return SKIP, "torch sees no GPU here", "on a node: srun --gres=gpu:1 elastic-doctor"
    if torch["problems"]:
        fix = "keep jobs away from the node: slurm.exclude"
        return FAIL if torch["unfit"] else WARN, "; ".join(torch["problems"]), fix
    return OK, f"{torch['gpus']} compute rightly, and report no memory errors", ""


def _cron(config, cron: str | None, cron_line: str, *, partitions) -> Judgement:
    if cron and re.search(r"(?m)^[^#\n]*elastic[- ]reconcile", cron):
        return OK, "elastic-reconcile is in the crontab", ""
    none = "there is no crontab and no scrontab here"
    seen = none if cron is None else "elastic-reconcile is not in the crontab"
    fix = f"where runs are submitted from, crontab -e: {cron_line}"
    ours = f"{config.slurm.partition},{config.slurm.master_partition}".split(",")
    properties = map(known(partitions, {}).get, ours)
    hosts = {each.get("AllocNodes", "ALL") for each in properties if each} - {"ALL"}
    if hosts:
        return FAIL, f"{seen}, and only {hosts.pop()} may submit jobs (AllocNodes)", fix
    return WARN, seen, fix


# Facts that follow from others.
DERIVED = {"named": _named, "preemption": _preemption, "others": _others}
CHECKS = (
    Check("slurm", "without it nothing can be submitted", _slurm),
    Check("partition", "workers and trainers run there", _workers_partition),
    Check("master partition", "rounds wait while the master is away", _masters_partition),
    Check("habits", "what this site does to every job", _habits),
    Check("time limit", "a job that asks for more never starts", _time),
    Check("preemption", "what becomes of a job whose GPUs are taken", _mode),
    Check("notice", "what is not saved before the kill is lost", _notice),
    Check("limits", "a run gets no more GPUs than it may have jobs", _limits),
    Check("run folder", "all jobs of a run work there, and wait for it", _folder),
    Check("redis", "workers and master find each other there", lambda redis: (OK, redis, "")),
    Check("interface", "the master listens there for its workers", _interface),
    Check("clock", "jobs, Slurm and the pass compare times of each other", _clock),
    Check("torch", "every start of a worker waits for its import", _torch),
    Check("gpus", "one that computes wrongly spoils the run", _gpus),
    Check("cron", "only its pass replaces jobs when no master does", _cron),
)


# ---- a job that was tried (tryout.py) ------------------------------------------------


def _tried(words: str, *problems: tuple[Callable, str, str]) -> Callable:
    """A judge of the tried job, which says these words. A problem is (is it there?,
    verdict, fix)."""

    def judge(tried) -> Judgement:
        there = ((is_so(tried), verdict, "", fix) for is_so, verdict, fix in problems)
        return judgement(words.format(**tried), *there)

    return judge


TRIED = (
    Check("try job", "the jobs of runs are submitted and started so", _tried(
        "2 nodes after {waited_s:.0f} s, their ranks {startup_s:.0f} s later",
        (lambda t: t["startup_s"] > SLOW_START_S, WARN, "see prologs, the disk"))),
    Check("try ranks", "a rank can use no more than it sees", _tried(
        "{ranks[0][view]}; {ranks[3][view]}",
        (lambda t: any(rank["gpus"] < rank["given_gpus"] for rank in t["ranks"]), FAIL,
         "every rank must see all GPUs of its node: slurm.options, slurm.srun_options"),
        (lambda t: any(rank["cores"] < rank["given_cores"] for rank in t["ranks"]), WARN,
         "they are bound to fewer cores than Slurm gave: see slurm.srun_options"))),
    Check("try train", "ranks meet, and exchange gradients in every step", _tried(
        "{trained} of 4 ranks train together: {how}",
        (lambda t: t["trained"] < 4, FAIL, "see sync.bind, and set NCCL_DEBUG=INFO"))),
    Check("try files", "the jobs of a run meet in one folder", _tried(
        "{seen[0]} of 4 ranks see a file after {seen[1]:.1f} s; {locks} of 3 find one locked",
        (lambda t: t["seen"][0] < 4, FAIL, "set ELASTIC_RUNS to a shared filesystem"),
        (lambda t: t["seen"][1] > STALE_S, WARN, "mount it with actimeo=1 (NFS)"),
        (lambda t: t["locks"] < 3, WARN, "passes may submit jobs twice: mount with flock"))),
    Check("try kill", "the launcher starts ranks again when one dies", _tried(
        "srun tells {killed[0]} of 1 death within {killed[1]:.1f} s; steps end in {ended_s:.1f} s",
        (lambda t: not t["killed"][0], FAIL, "it must say so in words of launch.BAD_EXIT"),
        (lambda t: t["ended_s"] > SLOW_END_S, WARN, "new ranks may meet old ones on GPUs"))),
    Check("try notice", "what is not saved before the kill is lost", _tried(
        "{told[0]} of 3 ranks hear TERM within {told[1]:.1f} s; srun and batch script {lives};"
        " {saved[0]} of 4 that train save their last step within {saved[1]:.1f} s",
        (lambda t: t["told"][0] < 3, FAIL, "every rank must get TERM: see slurm.rank_prefix"),
        (lambda t: t["lives"] != "live on", FAIL, "srun must not end at its step's notice"),
        (lambda t: t["saved"][0] < t["trained"], FAIL, "ranks lose steps: see the logs"))),
    Check("try shrink", "a job that loses a node goes on with the others", _tried(
        "{shrunk}", (lambda t: t["is_stuck"], WARN, "without it the job ends, and waits"))),
)
