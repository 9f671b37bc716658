"""Configuration: layers and origins, the round trip through run.toml, and what is refused."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from elastic.base import config, environment, keys
from elastic.base.errors import UsageError
from helpers import ROOT

ETC = ROOT / "etc"
NO_SITE = Path(os.devnull)
LOCAL = '[run]\nscheduler = "local"\n[train]\nepochs = 1\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in an empty working directory and return its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTIC_SITE", os.devnull)

    def write_file(text, name="run.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return Path(name)

    return write_file


def problems_of(path, *overrides):
    with pytest.raises(UsageError) as caught:
        config.load(path, overrides)
    return str(caught.value)


# --- values and where they come from -------------------------------------------------------------


def test_the_command_line_beats_the_file_beats_the_site_file_beats_the_default(write):
    site = "[elastic]\nmin = 2\nmax = 5\nmax_pending = 3\n[task]\ndata = 'all'\ncontext = 8\n"
    run = "[elastic]\n# a comment\nmax = 6\nmin = 3\n[task]\ncontext = 9\n"
    site, run = write(site, "site.toml"), write(LOCAL + run)
    made = config.load(run, ["elastic.min=4"], site=site)
    assert (made.elastic.min, made.elastic.max, made.elastic.max_pending) == (4, 6, 3)
    assert made.origin("elastic.min") == "command line"
    assert made.origin("elastic.max") == "run.toml"
    assert made.origin("elastic.max_pending") == "site.toml"
    assert made.origin("elastic.max_failures") == "default"
    assert made.task == {"data": "all", "context": 9}


def test_the_site_file_is_found_by_the_environment(write, monkeypatch):
    write('[slurm]\npartition = "gpus"\n', "site.toml")
    monkeypatch.setenv("ELASTIC_SITE", "site.toml")
    made = config.load(write("[train]\nepochs = 1\n"))
    assert (made.slurm.partition, made.slurm.master_partition) == ("gpus", "gpus")
    monkeypatch.setenv("ELASTIC_SITE", "elsewhere.toml")
    assert "elsewhere.toml" in problems_of(Path("run.toml"))


def test_what_the_shell_tells_sbatch_counts_where_no_file_says_more(write, monkeypatch):
    """It was dropped without a word, and another account paid."""
    for name, value in {"ACCOUNT": "proj", "TIMELIMIT": "60", "PARTITION": "debug"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    slurm = config.load(write('[slurm]\npartition = "gpu"\n[train]\nepochs = 1\n'))
    assert (slurm.slurm.account, slurm.slurm.master_account) == ("proj", "proj")
    assert (slurm.slurm.time, slurm.slurm.partition) == ("60", "gpu")
    assert slurm.origin("slurm.account") == "SBATCH_ACCOUNT"


def test_origins_are_found_in_dotted_quoted_and_inline_writing(write):
    text = 'train.epochs = 1\n"run" = {scheduler = "local"}\n[ "elastic" ]\n"max" = 3\n'
    made = config.load(write(text))
    assert made.origin("train.epochs") == "run.toml"
    assert made.origin("elastic.max") == "run.toml"
    assert made.origin("run.scheduler") == "run.toml"  # no line of its own


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86400), ("0.5s", 0.5), ("250ms", 0.25)]
    + [(" 3 S ", 3), ("7", 7), (7, 7), (0.5, 0.5), (0, 0)],
)
def test_a_duration_is_text_with_a_unit_or_a_number_of_seconds(written, seconds):
    assert keys.parse(keys.TIME, written) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [("64kb", 65536), ("256mb", 1 << 28), ("1.5gb", 3 << 29), ("2TB", 2 << 40), ("7b", 7), (7, 7)],
)
def test_a_size_counts_in_powers_of_1024(written, size):
    assert keys.parse(keys.SIZE, written) == size


@pytest.mark.parametrize("wrong", ["", "s", "5 parsecs", "-5s", "1_0s", "nan", -1, True, [], "5mb"])
def test_what_is_no_duration_is_refused_with_the_value(wrong):
    with pytest.raises(UsageError, match="expected a duration") as caught:
        keys.parse(keys.TIME, wrong)
    assert keys.toml_value(wrong) in str(caught.value)


def test_what_is_left_open_is_settled_once(write):
    path = write(LOCAL, "small-1.toml")
    made = config.load(path)
    assert made.run.name == "small-1"
    assert made.run.folder == str(path.resolve().parent)
    assert made.local_sgd.outer_momentum == "auto"  # each round has its own
    assert made.local_sgd.outer_lr == "auto"
    for steps, momentum in [(200, 0.9), (100, 0.9), (99, 0.8), (11, 0.8), (10, 0.5), (1, 0.5)]:
        made = config.load(path, [f"local_sgd.inner_steps={steps}", "train.optimizer=adamw"])
        assert made.local_sgd.outer_momentum == momentum
    made = config.load(path, ["local_sgd.outer_momentum=0.3", "run.folder=sub"])
    assert made.local_sgd.outer_momentum == 0.3
    assert made.run.folder == str(path.resolve().parent / "sub")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_keeps_the_optimizer_it_began_with(write, optimizer):
    both = [config.load(write(LOCAL), [f"run.mode={mode}"]) for mode in ("local", "sync")]
    assert [each.train.optimizer for each in both] == ["muon"] * 2
    made = config.load(write(LOCAL), [f"train.optimizer={optimizer}"])
    written = write(made.to_toml(), "again.toml")
    assert config.load_written(written, ["run.mode=sync"]).train.optimizer == optimizer
    older = write(re.sub("(?m)^optimizer.*\n", "", made.to_toml()), "older.toml")
    assert config.load_written(older).train.optimizer == "adamw"


def test_overrides_need_no_quotes_and_keep_text_as_text(write):
    made = config.load(
        write(LOCAL),
        ["slurm.time=02:00:00", "slurm.account=0042", "slurm.qos='x y'", "train.compile=true"]
        + ["health.lease=1m", 'run.command=["python", "a=b.py"]', "task.data=some/folder"]
        + ["task.context=64", "local_sgd.fragment=1mb", "train.learning_rate=1"],
    )
    assert (made.slurm.time, made.slurm.account, made.slurm.qos) == ("02:00:00", "0042", "x y")
    assert (made.train.compile, made.health.lease_s) == (True, 60)
    assert made.run.command == ("python", "a=b.py")
    assert made.task == {"data": "some/folder", "context": 64}
    assert made.local_sgd.fragment_bytes == 1 << 20
    assert made.train.learning_rate == 1.0


# --- what is resolved can be written, read and explained -----------------------------------------


def test_the_resolved_file_loads_to_an_equal_config_whatever_the_site_says(write, monkeypatch):
    task = '[task]\nx = "é\\u007f\\n#"\ny.z = [1, {a = 1979-05-27}]\n'
    run = write(LOCAL + "[health]\nheartbeat = 0.25\n" + task)
    made = config.load(run, ["elastic.max=7", 'slurm.options=["--nice", "a b"]'])
    monkeypatch.setenv("ELASTIC_SITE", "no-longer-there.toml")
    written = made.to_toml().replace("[slurm]", "[slurm]\nof_another_version = 1")
    again = config.load_written(write(written + "[of_another]\nx = 1\n", "again.toml"))
    assert again == made
    assert "max = 7  # command line\n" in made.to_toml()
    assert again.to_toml().count("again.toml\n") == sum(map(len, keys.KEYS.values())) + 2


text = st.text(st.characters(exclude_categories=["Cs"]))
value = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
)


@given(value)
def test_any_value_survives_being_written_as_toml(value):
    assert tomllib.loads(f"value = {keys.toml_value(value)}")["value"] == value


@given(st.floats(0, 1e9), st.integers(0, 2**53))
def test_durations_and_sizes_survive_being_written(seconds, size):
    assert keys.parse(keys.TIME, keys.written(keys.TIME, seconds)) == seconds
    assert keys.parse(keys.SIZE, keys.written(keys.SIZE, size)) == size


def test_every_key_is_a_row_with_value_and_origin(write):
    made = config.load(write(LOCAL + "[task]\ndata = 'x'\n"), ["health.lease=90"])
    rows = {row[0]: row[1:] for row in made.rows()}
    assert rows["health.lease"] == ("90s", "command line")
    assert rows["elastic.max"] == (1, "default")
    assert rows["task.data"][0] == "x"
    names = [f"{section}.{key.name}" for section, rows in keys.KEYS.items() for key in rows]
    assert [*names, "task.data"] == list(rows)


def test_every_default_passes_its_own_check():
    for section in keys.KEYS.values():
        for key in section:
            keys.parse(key.kind, key.default)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("elastic.max = 'four'", 'elastic.max: expected an integer, got "four"'),
        ("elastic.max = true", "elastic.max: expected an integer, got true"),
        ("elastic.max = 2.0", "elastic.max: expected an integer, got 2.0"),
        ("elastic.min = 0", "elastic.min: must be between 1 and 100000, is 0"),
        ("elastic.min = 2", "elastic.min (2) is above elastic.max (1)"),
        (
            "elastic.max = 8\nsync.sizes = [6, 16]\nslurm.gpus_per_node = 4",
            "sync.sizes ([6, 16]) has none from elastic.min (1) to elastic.max (8) in nodes of 4",
        ),
        ("local_sgd.inner_steps = 0", "local_sgd.inner_steps: must be at least 1, is 0"),
        ("local_sgd.outer_momentum = 'car'", 'expected "auto" or a finite number'),
        ("local_sgd.outer_momentum = 1", "must be at least 0 and below 1, is 1"),
        ("local_sgd.compression = 'zip'", '"int8" or "int4", is "zip"'),
        ("train.learning_rate = nan", "train.learning_rate: expected a finite number"),
        ("train.compile = 1", "train.compile: expected true or false, got 1"),
        ("train.max_tokens = 5", "set one of train.epochs (1) and train.max_tokens (5)"),
        ("train.decay_fraction = 1", "are more than the whole run"),
        ("train.batchsize = 5", "unknown key, did you mean batch_size?; [train] has batch_size,"),
        ("health.heartbeat = '10s'", "health.lease is under two heartbeats"),
        ("run.name = 'a b'", "run.name: must be letters, digits"),
        ("run.name = 'x; rm -rf'", "run.name: must be letters, digits"),
        ("run.name = '../x'", "run.name: must be letters, digits"),
        ("run.task = 'elastic.tasks'", 'run.task: must be written "package.module:Class"'),
        ("run.mode = 'async'", 'run.mode: must be "local" or "sync", is "async"'),
        ("run.command = 'python x'", "run.command: expected an array of strings"),
        ("train.max_steps = 7", 'train.max_steps = 7 is for run.mode = "sync"'),
        *((f"redis.bind = {text}", 'redis.bind: must be "auto", an interface or the IPv4 address')
          for text in ("'0.0.0.0'", "'255.255.255.255'", "'224.0.0.1'", "'1'", "'127.1'", "'::1'",
                       "''", "'10.0.0.1 0.0.0.0'", r'"10.0.0.1\nprotected-mode no"', r'"lo\n"')),
        ("slurm.options = ['-Mother']", "slurm.options: must be without --clusters"),
        ("slurm.master_options = ['--clusters=x']", "slurm.master_options: must be without"),
        ("redis.port = 65536", "redis.port: must be between 0 and 65535"),
        ("helth.lease = 3", "unknown section helth, did you mean health?; there are run,"),
        ("name = 'x'", "unknown section name"),
        ("task = 3", "task is a section, not a key"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_rule(write, line, said):
    message = problems_of(write(f"train.epochs = 1\nrun.scheduler = 'local'\n{line}\n"))
    assert said in message
    assert message.startswith("run.toml cannot be used:\n")


@pytest.mark.parametrize(("low", "high", "gpus", "nearest"), [
    (12, 15, 8, "elastic.min to 8 or elastic.max to 16"),
    (9, 9, 4, "elastic.min to 8 or elastic.max to 12"),
    (8, 15, 8, ""), (12, 16, 8, ""), (2, 3, 4, ""), (1, 1, 1, ""),
])
def test_limits_that_no_whole_nodes_meet_are_refused_before_a_run_is_there(
    write, low, high, gpus, nearest
):
    """Such a job got 8 GPUs for a --min of 12. One that exists has to be seen to all the same."""
    limits = f"[elastic]\nmin = {low}\nmax = {high}\n"
    slurm = f"[slurm]\npartition = 'p'\ngpus_per_node = {gpus}\n[train]\nepochs = 1\n"
    run = write(f"[run]\nmode = 'sync'\n{limits}{slurm}")
    made = config.load_written(run)
    assert (made.elastic.min, made.elastic.max) == (low, high)
    for other in ("run.mode=local", "run.scheduler=local"):
        config.load(run, [other])
    if not nearest:
        config.load(run)
        return
    with pytest.raises(UsageError, match=f"no nodes of {gpus} GPUs make .*: set {nearest}$"):
        config.load(run)
    with pytest.raises(UsageError, match=f"set {nearest}$"):
        config.load_written(run, [f"elastic.min={low}"])


def test_a_slurm_run_without_a_partition_anywhere_is_refused(write):
    run = write("[train]\nepochs = 1\n")
    assert "slurm.partition is not set" in problems_of(run)
    assert config.load(run, ["slurm.partition=gpus"]).slurm.partition == "gpus"


def test_a_run_needs_room_for_one_worker(write):
    run = write("[train]\nepochs = 1\n[slurm]\npartition = 'p'\ngpus_per_worker = 8\n")
    assert "elastic.max (1) is below slurm.gpus_per_worker (8)" in problems_of(run)
    assert config.load(run, ["elastic.max=8"]).elastic.max == 8


def test_all_problems_come_in_one_error_each_with_its_place(write):
    run = write("[train]\nepoch = 1\n[elastic]\nmax = 'four'\nmin = 3\n[local_sgd]\nquorum = 2\n")
    lines = problems_of(run, "run.seed=-1", "run.scheduler=local").splitlines()
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        "run.toml",  # and not also that neither epochs nor max_tokens is set
        "run.toml",  # and not also that min is above max
        "run.toml",
        "command line",
    ]


def test_a_name_that_comes_from_the_file_is_checked_too(write):
    assert "run.name must be letters" in problems_of(write(LOCAL, "my run.toml"))


@pytest.mark.parametrize("override", ["", "elastic.max", "max=3", "=3", "elastic.=3"])
def test_a_malformed_override_is_refused(write, override):
    assert "not an override" in problems_of(write(LOCAL), override)


def test_a_file_that_cannot_be_read_is_refused(write, tmp_path):
    assert "cannot read none.toml: No such file" in problems_of(Path("none.toml"))
    assert "line 2" in problems_of(write("[run]\nname = \n"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "binary.toml is not TOML" in problems_of(Path("binary.toml"))


@pytest.mark.parametrize("value", [
    "x = " + "[" * 10_000 + "]" * 10_000, "x = " + "{a = " * 10_000 + "1" + "}" * 10_000,
    "x." * 10_000 + "a = 1",
], ids=["arrays", "tables", "dotted names"])
def test_what_is_nested_too_deeply_is_refused(write, value):
    assert "run.toml is not TOML" in problems_of(write(f"{LOCAL}[task]\n{value}\n"))
    said = problems_of(write(LOCAL), f"train.epochs={{{value}}}", "elastic.max=" + "[" * 10_000)
    assert "command line: train.epochs: expected an integer" in said
    assert "command line: elastic.max: expected an integer" in said


def test_no_number_is_larger_than_a_record_may_have(write):
    """The first commit had it, and could not be read."""
    said = problems_of(write(LOCAL), f"train.max_tokens={2**62}")
    assert "train.max_tokens: expected an integer" in said


# --- the files that are shipped ------------------------------------------------------------------


def test_the_file_of_all_keys_says_unit_and_rule_behind_each_default():
    """As the table has them: what is refused is what the file says."""
    remark = re.compile(r"(?m)^\w+ = .*?(?:  # (?:\[[^]]+\] ?)?(.*))?$")
    shown = remark.findall((ETC / "keys.toml").read_text())
    assert shown == [key.kind.rule for rows in keys.KEYS.values() for key in rows]


def test_the_file_of_all_keys_is_all_of_them_with_defaults_and_meanings():
    tables = tomllib.loads((ETC / "keys.toml").read_text())
    defaults = {s: {key.name: key.default for key in rows} for s, rows in keys.KEYS.items()}
    assert tables == defaults | {"task": {}}
    kinds = {section: set(rows) for section, rows in keys.KINDS.items()}
    assert kinds == {section: set(rows) for section, rows in defaults.items()}
    meant = re.findall(r"(?m)^((?:# .*\n)+)\w+ = ", (ETC / "keys.toml").read_text())
    assert len(meant) == sum(map(len, keys.KEYS.values()))
    assert not any(meaning[2].islower() for meaning in meant)


def test_the_site_file_as_shipped_sets_nothing():
    assert not any(tomllib.loads((ETC / "site.toml").read_text()).values())


def test_the_site_file_with_its_comments_removed_is_legal(write):
    uncommented = re.sub(r"(?m)^#(?=\w)", "", (ETC / "site.toml").read_text())
    made = config.load(write(LOCAL), site=write(uncommented, "site.toml"))
    assert made.slurm.partition == "preempt"


def test_the_demo_runs_without_slurm():
    made = config.load(ETC / "demo.toml", site=NO_SITE)
    assert (made.run.name, made.run.scheduler) == ("demo", "local")
    assert made.local_sgd.outer_momentum == "auto"


@pytest.mark.parametrize("name", ["125m", "7b"])
def test_the_cluster_examples_need_only_a_partition(name):
    path = ETC / f"{name}.toml"
    with pytest.raises(UsageError) as caught:
        config.load(path, site=NO_SITE)
    assert str(caught.value).count("\n") == 1, "one problem only"
    assert config.load(path, ["slurm.partition=p"], site=NO_SITE).task["model"] == name


# --- the environment -----------------------------------------------------------------------------


def test_the_environment_of_a_job_is_free_of_an_outer_job_and_of_the_session(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SBATCH_PARTITION", "SRUN_X", "PMIX_RANK"):
        monkeypatch.setenv(name, "x")
    for name in ("SSH_AUTH_SOCK", "DISPLAY", "XDG_RUNTIME_DIR", "TMUX_PANE", "ELASTIC_JOB_ID"):
        monkeypatch.setenv(name, "x")
    kept = ("PYTHONPATH", "LD_LIBRARY_PATH", "MODULEPATH", "OMP_NUM_THREADS", "XDG_CACHE_HOME",
            "NCCL_DEBUG")
    for name in kept:
        monkeypatch.setenv(name, "kept")
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    monkeypatch.setenv("SLURM_CONF_SERVER", "head:6817")  # of a site without files of its own
    monkeypatch.setenv("SLURM_JWT", "x")  # a secret
    clean = environment.clean_environment()
    assert "x" not in clean.values()
    assert clean["SLURM_CONF_SERVER"] == "head:6817"
    assert list(clean.values()).count("kept") == len(kept)
    assert clean["SLURM_CONF"] == os.devnull
    assert not {"PWD", "OLDPWD", "SHLVL", "_"} & clean.keys()
    assert clean["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("RANK", "0")  # in a rank's shell the network and cores are its node's
    assert not {"NCCL_DEBUG", "OMP_NUM_THREADS"} & environment.clean_environment().keys()


def test_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("ELASTIC_TEST", "")
    environment.environment()["ELASTIC_TEST"] = "changed"
    assert environment.env("ELASTIC_TEST") is None
    assert environment.env("ELASTIC_TEST", "default") == "default"


def test_runs_and_registry_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ELASTIC_RUNS", raising=False)
    monkeypatch.delenv("ELASTIC_HOME_DIR", raising=False)
    assert environment.runs_root() == tmp_path / "runs"
    assert environment.registry_dir() == tmp_path / "home" / ".elastic"
    monkeypatch.setenv("ELASTIC_RUNS", "elsewhere")
    monkeypatch.setenv("ELASTIC_HOME_DIR", "~/state")
    assert environment.runs_root() == tmp_path / "elsewhere"
    assert environment.registry_dir() == tmp_path / "home" / "state"
    assert environment.elastic_home() == ETC.parent


def test_a_user_whom_nobody_has_a_name_for_has_a_number(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54_321)
    assert environment.user_name() == "54321"


def test_a_run_that_is_submitted_from_a_job_is_no_rank_of_that_job(monkeypatch):
    """From salloc, or a notebook: every rank of the run took itself for rank 0 of 1."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "3", "TMPDIR": "/tmp/job.7"}
    assert environment.clean_environment({"A": "b", "TMPDIR": "/scratch"})["TMPDIR"] == "/scratch"
    assert environment.clean_environment({"A": "b", "SLURM_JOB_ID": "7", **own}) == {"A": "b"}
