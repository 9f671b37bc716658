"""The process environment, which only this file reads, and the places that it leads to.

An empty variable counts as not set. What a job or a command of Slurm's is given is
cleaned of what an outer job, a login session or a user's settings left in it.
"""

import os
import pwd
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import elastic
from elastic.base.durable import check_private
from elastic.base.errors import UsageError

LEADS = ("SLURM_CONF", "SLURM_CONF_SERVER")  # to the cluster, where /etc/slurm does not
_OF_A_JOB = ("SLURM", "SRUN_", "PMI", "ELASTIC_JOB_ID", "ELASTIC_RANK", "ELASTIC_PROGRESS")
# A user's settings for Slurm's commands would filter their answers or change their form.
_OF_COMMANDS = ("SBATCH_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCT_")
_OF_A_SESSION = ("SSH_", "XDG_RUNTIME_DIR", "XDG_SESSION_", "XDG_SEAT", "XDG_VTNR", "DBUS_",
                 "TMUX", "TERM_", "VSCODE_", "DISPLAY", "XAUTHORITY")  # fmt: skip
# Where the session is itself a job's: its GPUs, its ranks' places, a folder that ends
# with it.
_OF_ITS_STEP = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT", "TMPDIR")  # fmt: skip
_OF_A_RANK = ("NCCL_", "GLOO_")  # in one's shell: what sbatch/network.sh chose for its node
_OF_A_SHELL = ("STY", "WINDOW", "WINDOWID", "PWD", "OLDPWD", "SHLVL", "_")


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def env(name: str, default: str | None = None) -> str | None:
    """One environment variable; an empty one counts as not set."""
    return os.environ.get(name) or default


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a job, or for a command of Slurm's: `given`, else this
    process's, without what an outer job, a login session or the user's settings left in
    it. What leads to the cluster stays; SLURM_CONF where that file is: a job's own may be
    in a folder of its node's slurmd."""
    given = os.environ if given is None else given
    dropped = _OF_A_JOB + _OF_COMMANDS + _OF_A_SESSION + (_OF_A_RANK if "RANK" in given else ())
    names = _OF_A_SHELL + (_OF_ITS_STEP if "SLURM_JOB_ID" in given else ())
    kept = {name: value for name, value in given.items()
            if not (name.startswith(dropped) or name in names)}  # fmt: skip
    leads = LEADS if os.path.exists(given.get("SLURM_CONF", "")) else LEADS[1:]
    return kept | {name: given[name] for name in leads if given.get(name)}


def elastic_home() -> Path:
    """The checkout or installation: the folder that holds bin, etc, lib and sbatch."""
    return Path(elastic.__file__).resolve().parents[2]


def commands() -> Path:
    """The folder of the commands for crontabs and people: of versions side by side the
    one that leads to the current one."""
    home = elastic_home()
    beside = home.parent
    follows = (beside / "current").is_symlink() and (beside / "bin").is_dir()
    return (beside if follows else home) / "bin"


def cron_line() -> str:
    """What a user's crontab is to have."""
    names = filter(env, ("ELASTIC_HOME_DIR", "ELASTIC_PYTHON"))  # cron does not know them
    given = "".join(f"{name}={shlex.quote(env(name))} " for name in names)
    return f"*/2 * * * * {given}{shlex.quote(str(commands() / 'elastic-reconcile'))} --jitter"


def torch_program(name: str) -> list[str]:
    """The command line of a process that uses torch; its arguments follow."""
    return [sys.executable, "-P", "-m", "elastic.train.start", name]


def runs_root() -> Path:
    """Where new run directories go: $ELASTIC_RUNS, else ./runs."""
    return expanded(env("ELASTIC_RUNS", "runs"), "ELASTIC_RUNS").absolute()


def registry_dir(given: Mapping[str, str] | None = None) -> Path:
    """The user's own state, with links to runs: $ELASTIC_HOME_DIR (`given` goes before this
    process's), else ~/.elastic."""
    named = (given or {}).get("ELASTIC_HOME_DIR") or env("ELASTIC_HOME_DIR", "~/.elastic")
    folder = expanded(named, "ELASTIC_HOME_DIR").resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "remove it, or set ELASTIC_HOME_DIR")
    for each in filter(Path.exists, (folder, folder / "runs", folder / "local" / "jobs")):
        check_private(each)  # what is here is run
    return folder


def expanded(text: str, name: str) -> Path:
    """`text`, which a setting of that name gives, with ~ and ~user replaced."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{name}: nobody knows whose home is meant in {text!r}",
                         f"write the whole path into {name}") from None  # fmt: skip


def user_name() -> str:
    """Whose process this is; a number where nobody has a name for it (in a container)."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def site_file() -> Path:
    """The one that $ELASTIC_SITE names, which has to be there, else this installation's
    etc/site.toml, or an empty file where it is not there."""
    path = Path(env("ELASTIC_SITE") or elastic_home() / "etc" / "site.toml")
    return path if env("ELASTIC_SITE") or path.exists() else Path(os.devnull)
