"""Slurm as a scheduler: the only module that runs its commands (squeue, sbatch, srun, …).

Facts that shape it. A question that Slurm does not answer is TryAgain, never "no jobs".
One squeue with `-t all` asks for everything: jobs that ended stay visible for MinJobAge
(300 s on most sites), so sacct is not needed. sbatch may fail and still have submitted,
so every doubt is TryAgain: a later pass looks for the job by its name. Slurm's own
variables leak from an outer job into a nested sbatch and break srun there, hence the
cleaned environment of every command. Restarts belong to reconcile alone: jobs are
`--no-requeue`, and `singleton` keeps two of one name from running at once, unless the
first is COMPLETING: writers are fenced by attempt.

Parsing, classifying and building the command line are pure functions.
"""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic.base.durable import write_atomic
from elastic.base.environment import clean_environment, elastic_home, env, registry_dir
from elastic.base.errors import ElasticError, TryAgain
from elastic.base.network import node_name
from elastic.jobs import sched, sizing
from elastic.jobs.history import LEAVING_STATES, MASTER, TRAINER, WORKER, Job, has_ended
from elastic.jobs.sched import JobSpec, Refused, RetryLater, parse_job_name
from elastic.jobs.slurm_text import Node, expand_hostlist, gpus_of
from elastic.run.rundir import RunDir

BEFORE_LIMIT = "TERM@120"  # a checkpoint may take longer than KillWait
STEPS_END_S = 15.0
LEAST_MB = 1024  # per GPU; Slurm takes a node whose memory nobody has named to have 1 MB
PROBES_AT_ONCE = 16  # steps; a burst of them is what a busy controller likes least
# Slurm's own MessageTimeout is 10 s, and some questions are asked twice.
COMMAND_TIMEOUT_S = 25.0

# Names, comments and reasons hold any printable character: separate by ones that are not.
_FIELD, _RECORD = "\x1f", "\x1e"
_COLUMNS = ("%i", "%T", "%V", "%S", "%e", "%N", "%r", "%B", "%k", "%j")
_FORMAT = f"--format={_FIELD.join(_COLUMNS)}{_RECORD}"
_SQUEUE = ("squeue", "--me", "--states=all", "--noheader", _FORMAT)
# Hidden partitions and the jobs in them, too; times in seconds since the epoch: a local
# time may come twice.
_ASKED = {"squeue": {"SQUEUE_ALL": "1", "SLURM_TIME_FORMAT": "%s"}, "sinfo": {"SINFO_ALL": "1"},
          "scontrol": {"SCONTROL_ALL": "1", "SLURM_TIME_FORMAT": "%s"}}

# From 23.11 on srun takes the cores that the job asked for, on a node, for those of each
# task. A job's GPUs are not those of each step.
_OF_THE_JOB = ("CPUS_PER_TASK", "TRES_PER_TASK", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK")
_SRUN = ("env", *(f"--unset=SLURM_{each}" for each in _OF_THE_JOB), "srun", "--mpi=none",
         "--overlap")

# What a command says when it does not know whether the controller did what was asked.
_NO_ANSWER = re.compile(
    "(?i)Socket timed out|Unable to contact|Unexpected message received|Zero Bytes|Connection|"
    "Transport endpoint|communication|standby mode"
)
_PRIVATE = "this site shows it to nobody (PrivateData in slurm.conf)"
_VOID = "void"  # in place of an answer: something has changed since
_GONE = re.compile("Invalid job id|already completing or completed")
_NOT_NOW = re.compile("(?i)SubmitJob|inactive or drain|not available now|try again|temporar|munge")


class SlurmScheduler:
    """This user's jobs on the cluster that PATH and SLURM_CONF lead to.

    They are taken from `environment` (a run's, where a crontab has none), else from this
    process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._environment = environment  # for questions; a job's own comes with its JobSpec
        given = clean_environment() if environment is None else environment
        self._cluster = given.get(sched.CLUSTER)  # None: in a run of an older Elastic
        name = f"squeue-{zlib.crc32(sched.cluster_of('slurm', given)[1].encode()):08x}"
        self._listing = registry_dir() / name  # the newest answer: good enough for status

    def jobs(self, within_s: float = 0.0) -> list[Job]:
        # Answers of squeue are costly where many ask.
        with contextlib.suppress(OSError):
            is_fresh = 0 <= time.time() - self._listing.stat().st_mtime < within_s
            if is_fresh and (known := self._listing.read_text()) != _VOID:
                return parse_squeue(known)
        self._check_cluster()
        asked_at, answer = time.time(), self._ask(*_SQUEUE)
        self._keep(answer, asked_at)
        return parse_squeue(answer)

    def submit(self, spec: JobSpec) -> str:
        self._forget()
        lists = bool(spec.config.sync.sizes) and _takes_size_lists(spec)
        argv = sbatch_argv(spec, spec.home, _job_python(spec), lists)
        answer = slurm_command(argv, environment=spec.environment)
        # A site's own sbatch may print more. If there are two numbers, one is not the job's.
        said = re.findall(r"(?m)^(\d+)(?:;\S+)?\s*$", answer.stdout)
        if answer.returncode == 0 and len(said) == 1:
            return said[0]
        raise refusal(answer.returncode, answer.stderr)

    def cancel(self, job_id: str, kill: bool = False) -> None:
        self._forget()
        # Without --batch or --full only the steps get the signal: shell and srun must
        # live to report.
        ways = [()] if kill else [("--state=PENDING",), ("--state=RUNNING", "--signal=TERM")]
        for options in ways:
            answer = slurm_command(("scancel", *options, job_id), environment=self._environment)
            if not _GONE.search(answer.stderr):
                _checked(answer)

    def wait_for(self, job_id: str, spec: JobSpec) -> None:
        nodes = spec.gpus[1] // spec.config.slurm.gpus_per_node
        self._ask("scontrol", "update", f"JobId={job_id}", f"NumNodes={nodes}-{nodes}")

    def _ask(self, *argv: str) -> str:
        return ask(*argv, environment=self._environment)

    def _check_cluster(self) -> None:
        """Two clusters may have one home, and each its own /etc/slurm."""
        here = self._cluster and cluster(self._environment)["ClusterName"]
        if here != self._cluster:
            what = f"this is cluster {here}, and the run's jobs are on {self._cluster}"
            raise sched.Elsewhere(what, "ask there")

    def _keep(self, answer: str, asked_at: float) -> None:
        """Store an answer, unless there is one to a later question."""
        with contextlib.suppress(OSError):
            if not self._listing.exists() or self._listing.stat().st_mtime < asked_at:
                write_atomic(self._listing, answer.encode(), 0o600)
                os.utime(self._listing, (asked_at, asked_at))

    def _forget(self) -> None:
        """Make void the stored answer, and those that a slow squeue is about to give:
        something will change."""
        with contextlib.suppress(OSError):
            self._listing.unlink(missing_ok=True)  # on a full disk, too
        self._keep(_VOID, time.time())

    def spare_gpus(self, spec: JobSpec, most: int) -> int:
        """On nodes that are idle and nothing else, while nobody else waits for the
        partition.

        Never an allocation to try it: after a slow prolog nobody would be there to let it
        go.
        """
        slurm, wanted = spec.config.slurm, spec.config.slurm.gpus_per_node
        # We do not ask which nodes a reservation holds, nor in which of several
        # partitions the job is (it cannot have nodes of two).
        is_unclear = "," in slurm.partition or _given(slurm, "reserv|nodel|nodef", "wF")
        if is_unclear or self._others_wait(slurm.partition):
            return 0
        avoided = [*spec.exclude, slurm.exclude, *_given(slurm, "exclude", "x")]
        avoided = expand_hostlist(",".join(avoided))
        fit = {node.name for node in nodes(self._environment)
               if node.partition == slurm.partition and node.state == "idle"
               and node.name not in avoided and _has_features(node, slurm)
               and (not slurm.gres or gpus_of(node.gres, slurm.gres) >= wanted)}
        return min(len(fit), most // wanted) * wanted

    def _others_wait(self, partition: str) -> bool:
        """Would a job of somebody else get what is free, or what a restart lets go for a
        moment?"""
        columns = f"--format={_FIELD.join(('%r', '%U', '%j', '%k'))}{_RECORD}"
        where = ("--states=PENDING", f"--partition={partition}")
        # A comment may have several lines.
        jobs = self._ask("squeue", "--noheader", *where, columns).split(_RECORD)[:-1]
        return any(reason in ("Resources", "Priority")
                   and not (user == str(os.getuid()) and any(map(parse_job_name, names)))
                   for reason, user, *names in (job.lstrip("\n").split(_FIELD) for job in jobs))


def release_nodes(job_id: str, kept: int) -> None:
    """Give back all nodes of this job but the first `kept`. TryAgain if Slurm does not do
    it."""
    ask("scontrol", "update", f"JobId={job_id}", f"NumNodes={kept}")
    # For shells, which scontrol leaves.
    for script in Path().glob(f"slurm_job_{job_id}_resize.*"):
        script.unlink(missing_ok=True)


def signal_steps(job_id: str, name: str = "TERM") -> bool:
    """Send a signal to the steps of a running job, and to nothing else of it (KILL would end
    the job). False if Slurm did not answer; that the job is ending anyway is an answer."""
    try:
        slurm_command(("scancel", f"--signal={name}", job_id))
    except TryAgain:
        return False
    return True


def end_steps(job_id: str) -> None:
    """Kill the tasks of this job's steps, and wait a short time for their end. (A step on
    a node that is gone ends only when Slurm has noticed.)"""
    argv = ("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i")
    until = time.monotonic() + STEPS_END_S
    while time.monotonic() < until:
        left = [step for step in ask(*argv).split() if step.rpartition(".")[2].isdigit()]
        if not left:
            return
        slurm_command(("scancel", "--signal=KILL", *left))
        time.sleep(0.5)


def step_argv(
    nodes: Sequence[str], per_node: int, command: Sequence[str], options: Sequence[str] = ()
) -> list[str]:
    """The command line that starts `per_node` tasks on each of these nodes of this job;
    `options`: the site's own for srun.

    Tasks of a node share its cores, unbound, as threads of one program would. srun takes
    one number of cores for all nodes, so it is that of the smallest. A step may overlap
    another: one on a node that is gone holds its GPUs until Slurm has noticed. A task that
    crashes does not end the others: srun would leave them KillWait, and is deaf meanwhile
    (see `end_steps`). Nor does a task that ends early, where a site has WaitTime.
    """
    cores = cores_per_node() or 1
    few = ["--overcommit"] if cores < per_node else [f"--cpus-per-task={cores // per_node}"]
    return [
        *_SRUN, f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * per_node}", f"--ntasks-per-node={per_node}", *few,
        "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", *options, *command,
    ]


def cores_per_node() -> int:
    """Cores that this job has on each of its nodes, at least; 0 outside of a job."""
    return min(map(int, re.findall(r"(?:^|,)(\d+)", env("SLURM_JOB_CPUS_PER_NODE", "0"))))


def answering(nodes: Sequence[str]) -> list[str]:
    """Those of this job's nodes that can start a step now. (Slurm itself may take minutes
    to see that a node is gone.) TryAgain if this node, which works, can start none."""
    asked = [*dict.fromkeys([node_name(), *nodes])]
    argv = [*_SRUN, "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--gres=none"]
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def starts(node: str) -> bool:
        probe = [*argv, f"--nodelist={node}", "true"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(probe, timeout=COMMAND_TIMEOUT_S, **quiet).returncode == 0
        return False

    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        # Try each twice: a busy controller may have been slow.
        found = pool.map(lambda node: starts(node) or starts(node), asked)
        up = list(itertools.compress(asked, found))
    if node_name() not in up:
        raise TryAgain("Slurm starts no step, on this node either", "is slurmctld up?")
    return [node for node in nodes if node in up]


def node_address() -> str:
    """What Slurm calls the node of this job (NodeAddr: an address or a name), or its name
    where users are shown no nodes; "" outside of one. TryAgain if Slurm is silent."""
    if not (node := env("SLURMD_NODENAME", "")):
        return ""
    answer = slurm_command(("scontrol", "--oneliner", "show", "node", node))
    return _properties(answer.stdout).get("NodeAddr", node)


def show(*what: str) -> str:
    """What scontrol shows of a node, job or partition, on one line. TryAgain if it does
    not say."""
    return ask("scontrol", "--oneliner", "show", *what)


# ---- what the cluster is like


def cluster(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Slurm's settings by name; "now": the controller's clock, in whole seconds since
    1970. TryAgain if Slurm does not say, or something else."""
    text = ask("scontrol", "--oneliner", "show", "config", environment=environment)
    as_of = re.search(r"data as of (\d+)\s", text)
    found = dict(re.findall(r"(?m)^(\w\S*) += (.*?) *$", text))
    if not as_of or "SLURM_VERSION" not in found:
        raise TryAgain(f"scontrol show config: not understood: {text[:80]!r}")
    return found | {"now": as_of[1]}


def partitions() -> dict[str, dict[str, str]]:
    """The properties of every partition, hidden ones included, by its name."""
    text = ask("scontrol", "-o", "show", "partition")
    found = [*map(_properties, re.findall("(?m)^PartitionName=.*", text))]
    if not found:
        raise _unread("scontrol", text)
    return {properties["PartitionName"]: properties for properties in found}


def _properties(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def nodes(environment: Mapping[str, str] | None = None) -> list[Node]:
    """Every node, once per partition that it is in. TryAgain where none is shown."""
    columns = f"--format={_FIELD.join(('%R', '%N', '%n', '%o', '%T', '%G', '%b'))}"
    argv = ("sinfo", "--noheader", "--Node", columns)
    lines = ask(*argv, environment=environment).splitlines()
    if not lines:
        raise TryAgain("sinfo shows no node", _PRIVATE)
    if odd := [line for line in lines if line.count(_FIELD) != columns.count(_FIELD)]:
        raise _unread("sinfo", odd[0])
    return [Node(*map(str.strip, line.split(_FIELD))) for line in lines]


def _given(slurm, long: str, short: str) -> list[str]:
    """The values that slurm.options gives to an option of sbatch. (sbatch also takes the
    first letters of a long name.)"""
    option = rf"(?:^| )(?:--(?:{long})\w*[= ]|-[{short}] ?)(\S+)"
    return re.findall(option, " ".join(slurm.options))


def _has_features(node: Node, slurm) -> bool:
    """Has the node what the workers' --constraint wants? Slurm reads it from left to
    right, & and | alike. For one with brackets or counts the answer is no."""
    has, names, given = True, node.features.split(","), _given(slurm, "cons", "C")
    for sign, name in re.findall(r"([&,|]?)([^&,|]+)", "".join(given[-1:])):
        has = (has or name in names) if sign == "|" else (has and name in names)
    return has


def share_of_gpu(slurm) -> tuple[int, str]:
    """The CPUs and the memory (as sbatch takes it) that a GPU's share is on the smallest
    node of the partitions. 0 and "" if Slurm has a default, if the site's own options say
    it in another way, or if Slurm does not say. Raises TryAgain."""
    names, there = slurm.partition.split(","), partitions()
    given_by = [*(there.get(name, {}) for name in names), cluster()]
    settings = [pair for each in given_by for pair in each.items()]
    defaults = [f"{key}={value}" for key, value in settings if value != "UNLIMITED"]
    given = " ".join((*defaults, *slurm.options))
    inside = [node for node in nodes() if node.partition in names]
    # With a constraint that is more than features, take all nodes.
    inside = [node for node in inside if _has_features(node, slurm)] or inside
    wanted = slurm.gres or ("gpu" if "--gpus" in given else "")
    shares = [*_shares({node.name: gpus_of(node.gres, wanted) for node in inside})]
    cpus, megabytes = map(min, zip(*shares, strict=True)) if shares else (0, 0)
    # CPUs are threads: where only cores are to be used, a share would have too many.
    has_cpus = re.search("DefCpuPerGPU|--cpus-per|(^| )-c|--hint|--threads-per-core", given)
    has_memory = megabytes < LEAST_MB or re.search("DefMemPer|--mem(?!-bind)", given)
    return 0 if has_cpus else cpus, "" if has_memory else f"{megabytes}M"


def _shares(gpus_on: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """A GPU's CPUs and megabytes on each of these nodes that has GPUs."""
    if not any(gpus_on.values()):
        return
    for node in map(_properties, show("node", ",".join(gpus_on)).splitlines()):
        if gpus := gpus_on.get(node["NodeName"]):
            megabytes = int(node["RealMemory"]) - int(node.get("MemSpecLimit", "0"))
            yield int(node.get("CPUEfctv", node["CPUTot"])) // gpus, megabytes // gpus


def association(user: str, account: str, cluster_name: str) -> dict[str, str]:
    """The user's limits in the account ("": the default one), by the names that sacctmgr
    gives its columns; empty where accounting does not know them. TryAgain if it does not
    say."""
    where = (f"name={user}", f"cluster={cluster_name}", "withassoc")
    limits = "MaxSubmitJobs,GrpSubmitJobs,MaxJobs,GrpJobs,GrpTRES"
    columns = f"DefaultAccount,Account,DefaultQOS,QOS,{limits}"
    rows = _accounting("user", *where, f"format={columns}")
    # Slurm keeps the names of accounts in lower case.
    return next((r for r in rows if r["Account"] == (account.lower() or r["Def Acct"])), {})


def qos(*names: str) -> list[dict[str, str]]:
    """The limits of these QOS, and how their jobs are preempted."""
    limits = "MaxSubmitJobsPerUser,GrpSubmitJobs,MaxJobsPerUser,GrpJobs,GrpTRES,MaxTRESPerUser"
    columns = f"Name,PreemptMode,GraceTime,{limits}"
    return _accounting("qos", f"name={','.join(names)}", f"format={columns}")


def _accounting(what: str, *conditions: str) -> list[dict[str, str]]:
    argv = ("sacctmgr", "--parsable2", "--readonly", "show", what, "where", *conditions)
    header, *lines = ask(*argv).splitlines() or [""]
    return [dict(zip(header.split("|"), line.split("|"), strict=True)) for line in lines]


def ask(*argv: str, environment: Mapping[str, str] | None = None) -> str:
    """What a client command says. TryAgain if it has failed, or gives no answer."""
    return _checked(slurm_command(argv, environment=environment))


def slurm_command(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client command. TryAgain where it gets no answer, or gives none in time;
    RetryLater where it says that it waits for a cluster that is full.

    Its environment is this process's, or `environment`, cleaned of what steers Slurm's
    commands.
    """
    given = clean_environment(environment)
    given.setdefault("PATH", env("PATH", "/usr/local/bin:/usr/bin:/bin"))
    # The PATH of a run may lead to a version of Slurm that is gone.
    program = shutil.which(argv[0], path=given["PATH"]) or shutil.which(argv[0])
    if program is None:
        hint = "is Slurm's bin directory in PATH? A crontab sets PATH and SLURM_CONF at its top"
        raise ElasticError(f"Command not found: {argv[0]}", hint)
    try:
        answer = subprocess.run(
            [program, *argv[1:]], env=given | _ASKED.get(argv[0], {}), timeout=COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace").strip()
        if _NOT_NOW.search(said):  # sbatch tells of a full queue, and tries again for minutes
            raise RetryLater(said.splitlines()[-1]) from None
        silence = f"{argv[0]} gave no answer in {COMMAND_TIMEOUT_S:g} s"
        raise TryAgain(silence, "is slurmctld up?") from None
    # No words: the command died.
    is_silence = not answer.stderr.strip() or _NO_ANSWER.search(answer.stderr)
    if answer.returncode != 0 and is_silence:
        _checked(answer)  # raises
    return answer


def parse_squeue(text: str) -> list[Job]:
    """The elastic jobs in squeue's answer. TryAgain if the answer is damaged or cut
    short."""
    *records, rest = text.split(_RECORD)
    if rest.strip():
        raise _unread("squeue", rest)
    jobs = []
    for record in records:
        fields = record.removeprefix("\n").split(_FIELD)
        # More fields: a job that is not ours has a separator in its name. No id at the
        # start: a site's own squeue says more.
        if len(fields) < len(_COLUMNS) or not re.fullmatch(r"\d\S*", fields[0]):
            raise _unread("squeue", record)
        job_id, state, submitted, started, ended, node, reason, host, *names = fields
        # The comment first: a site's submit plugin may give a job the name of another.
        whose = next(filter(None, map(parse_job_name, names)), None)
        if whose:
            is_running = state == "RUNNING"
            run, role, slot = whose
            jobs.append(Job(
                job_id, role, slot, state, reason, _epoch(submitted) or 0.0, run=run, node=node,
                # Before a job starts, and until it ends, these times are only forecasts.
                started_at=None if state == "PENDING" else _epoch(started),
                ended_at=_epoch(ended) if has_ended(state) or state in LEAVING_STATES else None,
                limit_at=_epoch(ended) if is_running else None,
                is_headless=is_running and host not in expand_hostlist(node),
            ))
    return jobs


def sbatch_argv(spec: JobSpec, home: Path, python: str, lists: bool = False) -> list[str]:
    """The sbatch command line of a job; `home`: the installation, `python`: what runs it
    there, `lists`: this Slurm takes lists of sizes."""
    log = str(RunDir(spec.run_dir).log_path(spec.role, spec.slot)).replace("%", "%%")
    after = [f"after:{spec.after}"] if spec.after else []
    waits = ",".join((["singleton"] if spec.alone else []) + after)
    return [
        "sbatch", "--parsable", f"--job-name={spec.name}", f"--comment={spec.name}",
        "--no-requeue", *([f"--dependency={waits}"] if waits else []), "--export=ALL",
        f"--chdir={spec.run_dir}", "--open-mode=append", f"--output={log}",
        *_resources(spec, lists),
        str(home / "sbatch" / f"{spec.role}.sbatch"),
        str(home), python, str(spec.run_dir), str(spec.slot),
        *(spec.config.slurm.srun_options if spec.role == WORKER else ()),
    ]


def refusal(code: int, stderr: str) -> ElasticError:
    """What sbatch's failure means. Words that are not known (a site's own plugin's, say)
    are a refusal."""
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.splitlines()]
    what = f"sbatch: {'; '.join(line for line in said if line) or f'exit status {code}'}"
    if code == 0:
        return TryAgain(what, "is slurmctld up? scontrol ping")
    if _NOT_NOW.search(stderr):
        return RetryLater(what)
    return Refused(what, "see the [slurm] section of the configuration")


def _checked(answer: subprocess.CompletedProcess[str]) -> str:
    """What a command said. TryAgain if it has failed."""
    if answer.returncode != 0:
        said = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        is_hidden = said[-1].endswith("permission denied")
        hint = _PRIVATE if is_hidden else "is slurmctld up, and SLURM_CONF right?"
        raise TryAgain(f"{Path(answer.args[0]).name} failed: {said[-1]}", hint)
    return answer.stdout


def _unread(command: str, text: str) -> TryAgain:
    what = f"{command}: the answer cannot be read, or is cut short: {text.strip()[:80]!r}"
    return TryAgain(what, "a script of this site's in its place may say more than Slurm")


def _epoch(text: str) -> float | None:
    return float(text) if text.isdigit() else None  # N/A, Unknown


def _memory(per_gpu: str, gpus: int) -> str:
    amount = re.match(r"\d+", per_gpu)
    return f"{int(amount[0]) * gpus}{per_gpu[amount.end() :]}" if amount and gpus else ""


def _job_python(spec: JobSpec) -> str:
    """The Python that the user chose, also when cron submits. "": the run was submitted
    with another version, which chooses its own."""
    if chosen := spec.environment.get("ELASTIC_PYTHON") or env("ELASTIC_PYTHON"):
        return chosen
    return sys.executable if spec.home == elastic_home() else ""


def _takes_size_lists(spec: JobSpec) -> bool:
    """Does this sbatch take `--nodes=1,2,4` (since 23.02)? If not, the launcher gives
    back what is over."""
    answer = slurm_command(("sbatch", "--version"), environment=spec.environment)
    versions = re.findall(r"(?m)^slurm\S* (\d+)\.(\d+)", answer.stdout)
    return any((int(year), int(month)) >= (23, 2) for year, month in versions)


def _size(spec: JobSpec, lists: bool) -> list[str]:
    """A range of nodes for a trainer, of which Slurm takes what is free at every start.
    (With a number of tasks it would take the fewest, so the layout is left to srun,
    inside the job.) A job that loses a node goes on with the others."""
    if spec.role != TRAINER:
        return ["--nodes=1", "--ntasks=1"]
    per_node, sizes = spec.config.slurm.gpus_per_node, spec.config.sync.sizes
    counts = sizing.node_counts(spec.gpus, per_node, sizes)
    nodes = ",".join(map(str, counts)) if lists else f"{counts[0]}-{counts[-1]}"
    return [f"--nodes={nodes}", "--no-kill"]


def _resources(spec: JobSpec, lists: bool) -> list[str]:
    slurm = spec.config.slurm
    is_master, is_trainer = spec.role == MASTER, spec.role == TRAINER
    gpus = slurm.gpus_per_node if is_trainer else spec.gpus[1]  # per node
    cpus = slurm.master_cpus if is_master else slurm.cpus_per_gpu * gpus
    of = "master_" if is_master else ""
    names = ("partition", "account", "qos", "time")
    wanted = {name: getattr(slurm, of + name) for name in names} | {
        "gres": f"{slurm.gres}:{gpus}" if gpus and slurm.gres else "",
        "cpus-per-task": str(cpus or ""),
        "mem": slurm.master_mem if is_master else _memory(slurm.mem_per_gpu, gpus),
        # Without `B`, which would signal the batch shell, and not the step with the agent.
        "signal": re.sub("^B:|B(?=R?:)", "", slurm.signal) or (BEFORE_LIMIT if is_trainer else ""),
        "exclude": ",".join(filter(None, (slurm.exclude, *spec.exclude))),
    }
    options = [f"--{name}={value}" for name, value in wanted.items() if value]
    return [*_size(spec, lists), *options, *getattr(slurm, of + "options")]
