"""The process environment, which only this file reads, and the paths that it names.

An empty variable counts as not set. Jobs, and commands of Slurm, get an environment
without the variables of an outer job, of a login session, or of a user's settings for
Slurm.
"""

import os
import pwd
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import elastic
from elastic.base.durable import check_private, make_folder
from elastic.base.errors import ElasticError, UsageError

LEADS = ("SLURM_CONF", "SLURM_CONF_SERVER")  # to the cluster, where /etc/slurm does not
_OF_A_JOB = ("SLURM", "SRUN_", "PMI", "ELASTIC_JOB_ID", "ELASTIC_RANK", "ELASTIC_PROGRESS")
# A user's settings for Slurm's commands would filter their answers or change their form.
_OF_COMMANDS = ("SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCT_")
_OF_A_SESSION = ("SSH_", "XDG_RUNTIME_DIR", "XDG_SESSION_", "XDG_SEAT", "XDG_VTNR", "DBUS_",
                 "TMUX", "TERM_", "VSCODE_", "DISPLAY", "XAUTHORITY")
# In a session inside of a job: the job's GPUs, the places of its ranks, a folder that
# ends with the job.
_OF_ITS_STEP = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT", "TMPDIR")
_PATHS = ("PYTHONPATH", "ELASTIC_PYTHON", "ELASTIC_HOME_DIR", "SLURM_CONF")
_OF_A_RANK = ("NCCL_", "GLOO_", "OMP_NUM_THREADS")  # in a rank's shell: chosen for its node
_OF_A_SHELL = ("STY", "WINDOW", "WINDOWID", "PWD", "OLDPWD", "SHLVL", "_")


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def env(name: str, default: str | None = None) -> str | None:
    """One environment variable; an empty one counts as not set."""
    return os.environ.get(name) or default


def tidy() -> None:
    """Make this command's environment what jobs and cron, which start in other folders, can
    be given: whole paths. (With 0 columns rich would print nothing.)"""
    for name in filter(env, _PATHS):
        begin = "(?<![^:])" if name == "PYTHONPATH" else "^"
        if name != "ELASTIC_PYTHON" or "/" in env(name):  # else it is in PATH
            os.environ[name] = re.sub(f"{begin}(?=[^:/~])", lambda _: f"{os.getcwd()}/", env(name))
    if not env("COLUMNS", "80").strip("0"):
        del os.environ["COLUMNS"]


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a job, or for a command of Slurm's: `given`, else this
    process's, without the variables of an outer job, of a login session and of the user's
    settings. Those that lead to the cluster stay; SLURM_CONF only if that file is there:
    in a job it may name a file on the job's node."""
    given = os.environ if given is None else given
    dropped = _OF_A_JOB + _OF_COMMANDS + _OF_A_SESSION + (_OF_A_RANK if "RANK" in given else ())
    names = _OF_A_SHELL + (_OF_ITS_STEP if "SLURM_JOB_ID" in given else ())
    kept = {name: value for name, value in given.items()
            if not (name.startswith(dropped) or name in names)}
    leads = LEADS if os.path.exists(given.get("SLURM_CONF", "")) else LEADS[1:]
    return kept | {name: given[name] for name in leads if given.get(name)}


def elastic_home() -> Path:
    """The checkout or installation: the folder that holds bin, etc, lib and sbatch."""
    return Path(elastic.__file__).resolve().parents[2]


def commands() -> Path:
    """The folder of the commands for crontabs and people. Where versions are installed
    side by side, its links lead to the current version."""
    home = elastic_home()
    beside = home.parent
    follows = (beside / "current").is_symlink() and (beside / "bin").is_dir()
    return (beside if follows else home) / "bin"


def cron_line() -> str:
    """The line for a user's crontab."""
    names = filter(env, ("ELASTIC_HOME_DIR", "ELASTIC_PYTHON"))  # cron has none of them
    given = "".join(f"{name}={shlex.quote(env(name))} " for name in names)
    line = f"*/2 * * * * {given}{shlex.quote(str(commands() / 'elastic-reconcile'))} --jitter"
    return line.replace("%", r"\%")  # which cron takes for the end of a line


def torch_program(name: str) -> list[str]:
    """The command line of a process that uses torch; its arguments follow."""
    return [sys.executable, "-P", "-m", "elastic.train.start", name]


def keep_compiled() -> None:
    """Choose a folder of the user's own for what torch compiles. torch unpickles what it
    finds there, and its own choice is a name in /tmp that another user may have taken."""
    if env("TORCHINDUCTOR_CACHE_DIR"):
        return
    folder = Path(tempfile.gettempdir()) / f"elastic-compiled-{os.getuid()}"
    try:
        make_folder(folder, 0o700)
        check_private(folder)
    except ElasticError:  # it is taken: this process compiles anew
        folder = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def runs_root() -> Path:
    """Where new run directories go: $ELASTIC_RUNS, else ./runs."""
    return expanded(env("ELASTIC_RUNS", "runs"), "ELASTIC_RUNS").absolute()


def registry_dir(given: Mapping[str, str] | None = None) -> Path:
    """The folder of the user's own state, with links to runs: $ELASTIC_HOME_DIR in
    `given`, else in this process's environment, else ~/.elastic."""
    named = (given or {}).get("ELASTIC_HOME_DIR") or env("ELASTIC_HOME_DIR", "~/.elastic")
    folder = expanded(named, "ELASTIC_HOME_DIR").resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "remove it, or set ELASTIC_HOME_DIR")
    for each in filter(Path.exists, (folder, folder / "runs", folder / "local" / "jobs")):
        check_private(each)  # programs are started from here
    return folder


def expanded(text: str, name: str) -> Path:
    """The path `text`, with ~ and ~user replaced; `name` is the setting that gives it."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{name}: nobody knows whose home is meant in {text!r}",
                         f"write the whole path into {name}") from None


def user_name() -> str:
    """This process's user; his number if he has no name, as in a container."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def site_file() -> Path:
    """The site's settings: the file that $ELASTIC_SITE names, which has to be there, else
    this installation's etc/site.toml, else an empty file."""
    path = Path(env("ELASTIC_SITE") or elastic_home() / "etc" / "site.toml")
    return path if env("ELASTIC_SITE") or path.exists() else Path(os.devnull)
