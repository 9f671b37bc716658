"""What Slurm says about a job: environments and answers as Slurm writes them, and resume paths."""

import errno
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from elastic.base.errors import ElasticError
from elastic.jobs.slurm_info import (
    SLURMInfo,
    end_time,
    expand_hostlist,
    get_slurm_info,
    kill_at,
    log_job_info,
    notice_s,
    resolve_resume_path,
    resume_paths,
    with_end_time,
)

INFO = SLURMInfo("4711", 2, ("n1", "n2"), 4, (4, 4), "gpu", 1_790_000_000.0)
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_END_TIME": "1790000000",
}
PARTITION = (
    "PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime={} Hidden=NO"
)
JOB = (
    "JobId=7 JobName=wrap UserId=root(0) JobState=RUNNING Reason=None RunTime=00:00:01 "
    "SubmitTime=1785751200 StartTime=1785751200 EndTime=1785754800 "
    "PreemptTime=None Partition=low AllocNode:Sid=lab:1 NodeList=n1"
)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """job(NAME=value, ...): the environment of a job, and nothing else of Slurm."""

    def set_environment(**variables: str) -> None:
        for name in STEP:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    monkeypatch.delenv("SLURM_JOB_GPUS", raising=False)
    set_environment()
    return set_environment


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """scontrol(script): a command of this name that runs it."""

    def write(script: str) -> None:
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_outside_of_slurm_there_is_no_job(job):
    assert get_slurm_info() is None


def test_a_step_sees_its_own_nodes_and_tasks(job):
    job(**STEP)
    assert get_slurm_info() == INFO


def test_a_batch_shell_sees_the_job(job):
    job(**{name: value for name, value in STEP.items() if "STEP" not in name})
    info = get_slurm_info()
    assert info.nodes == ("n1", "n2", "n3", "n4")
    assert info.tasks_per_node == (1, 1, 1, 1)


def test_a_bare_srun_and_an_old_slurm_say_less(job):
    job(SLURM_JOB_ID="7", SLURM_STEP_GPUS="0,2-3")
    assert get_slurm_info() == SLURMInfo("7", gpus_on_node=3)


def test_the_end_time_is_in_seconds_or_unknown():
    """Of a local time nobody knows which one it is, in the hour that comes twice."""
    assert end_time(JOB) == 1785754800
    assert end_time(JOB.replace("1785754800", "Unknown")) is None
    assert end_time(JOB.replace("1785754800", "2026-08-03T11:00:00")) is None
    assert end_time("") is None


@pytest.mark.parametrize(("said", "seconds"), [("5", 45), ("00:02:10", 170), ("0", 40), ("", None)])
def test_the_notice_is_the_grace_time_and_kill_wait(scontrol, said, seconds: float | None):
    """Measured: GraceTime=6, KillWait=15: TERM, once more 23 s later, KILL after another 14.5 s."""
    scontrol(f'''case "$3 $4" in
        "partition low") echo "{PARTITION.format(said)}";;
        "config ") echo "KillWait                = 40 sec";;
    esac''')
    assert notice_s("low") == seconds
    assert notice_s("high") is None


def test_where_the_qos_says_the_notice_only_kill_wait_is_sure(scontrol):
    scontrol(f'''case "$3 $4" in
        "partition low") echo "{PARTITION.format(300)}";;
        "config ") printf 'KillWait = 30 sec\nPreemptType = preempt/qos\n';;
    esac''')
    assert notice_s("low") == 30


@pytest.mark.parametrize(("end", "left_s"), [("1785754800", 300 + 30), ("Unknown", None)])
def test_a_job_is_killed_kill_wait_after_its_end_time(scontrol, job, end, left_s):
    """USR2@300 bought nothing before a time limit: GraceTime was taken for the end of everything.
    That a preemption moves EndTime is seen on a real Slurm, in test_sites."""
    told = JOB.replace("1785754800", end)
    scontrol(f'''case "$3" in
        job) echo "{told}";;
        config) echo "KillWait                = 30 sec";;
    esac''')
    assert kill_at() is None
    job(**STEP)
    assert kill_at() == (left_s and 1785754500 + left_s)


def test_slurm_is_asked_for_what_the_environment_does_not_hold(scontrol):
    partition = 'partition) echo "PartitionName=$4 GraceTime=7";;'
    scontrol(f'case "$3" in job) echo "{JOB}";; {partition} esac')
    assert with_end_time(replace(INFO, end_time=None)).end_time == end_time(JOB)
    assert with_end_time(INFO) is INFO
    assert notice_s("low") == 7


@pytest.mark.parametrize("answer", ["echo 'Invalid job id' >&2; exit 1", "echo", "kill $$"])
def test_what_slurm_does_not_say_stays_unknown(scontrol, answer: str):
    scontrol(answer)
    unknown = replace(INFO, end_time=None)
    assert with_end_time(unknown) == unknown
    assert notice_s("low") is None


def test_a_machine_without_slurm_knows_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert notice_s("low") is None


def test_the_banner_holds_job_size_time_and_nccl(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    lines = []
    log_job_info(replace(INFO, end_time=time.time() + 3601), lines.append)
    assert lines == [
        "job 4711, restarts 2: 2 nodes x 4 GPUs, partition gpu, time left 60 min, NCCL_DEBUG WARN"
    ]
    monkeypatch.delenv("NCCL_DEBUG")
    log_job_info(replace(INFO, end_time=None), lines.append)
    assert "time left unknown, NCCL_DEBUG not set" in lines[1]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ""),
        ("n1", "n1"),
        ("n[1-3,7],m4", "n1 n2 n3 n7 m4"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
        ("gpu-a[3],gpu-b,c[001-002,010]", "gpu-a3 gpu-b c001 c002 c010"),
        ("n[99-101]", "n99 n100 n101"),
    ],
)
def test_a_host_list_is_expanded_in_its_order(text: str, hosts: str):
    assert expand_hostlist(text) == hosts.split()


@given(
    st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r2c"]), st.integers(1, 4),
                       st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9)), min_size=1)))
)  # fmt: skip
def test_every_range_gives_its_numbers_at_its_width(groups):
    parts, hosts = [], []
    for prefix, width, spans in groups:
        ranges = [(f"{low:0{width}d}", low, low + more) for low, more in spans]
        parts.append(f"{prefix}[{','.join(f'{low}-{high}' for low, _, high in ranges)}]")
        hosts += [f"{prefix}{number:0{len(text)}d}"
                  for text, low, high in ranges for number in range(low, high + 1)]  # fmt: skip
    assert expand_hostlist(",".join(parts)) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n1-3]", "n[]", "n[a-b]", "n[1-2[3]]", "n[1-2-3]"])
def test_a_damaged_host_list_is_an_error(text: str):
    with pytest.raises(ElasticError, match="not a Slurm host list"):
        expand_hostlist(text)


def newest(folder: Path, *names: str) -> str:
    """The checkpoint to resume from, of files with these names that are equally old."""
    for path in folder.iterdir():
        path.unlink()
    for name in names:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    found = resolve_resume_path(folder)
    return found.name if found else ""


def test_the_newest_checkpoint_is_the_highest_step_whatever_its_name(tmp_path: Path):
    assert newest(tmp_path, "step_9.pt", "step_100.pt", "step_20.pt") == "step_100.pt"
    assert newest(tmp_path, "epoch3.pt", "epoch10.pt") == "epoch10.pt"
    names = ["epoch=3-step=1200.ckpt", "epoch=3-step=900.ckpt"]
    assert newest(tmp_path, *names) == names[0]
    assert newest(tmp_path, "step_100.epoch_9.pt", "step_20.epoch_10.pt") == "step_20.epoch_10.pt"
    # Of a program whose steps begin anew in each epoch: it went back to epoch 0 each time.
    names = ["epoch_0_step_80.pt", "epoch_0_step_100.pt", "epoch_1_step_20.pt"]
    assert newest(tmp_path, *names) == names[-1]
    assert newest(tmp_path, "0100.pt", "0200.pt") == "0200.pt"
    assert newest(tmp_path, "step_5.optimizer.pt", "step_5.pt") == "step_5.pt"
    assert newest(tmp_path, "step_198.pt", "step_198_ema.pt", "step_198-opt.pt") == "step_198.pt"
    assert newest(tmp_path, "checkpoint_200.pt", "rng_state_200.pt") == "checkpoint_200.pt"
    assert newest(tmp_path, "ckpt_epoch_2.pt", "swa_epoch_2.pt") == "ckpt_epoch_2.pt"


def test_names_without_a_step_and_temporary_ones_are_no_checkpoints(tmp_path: Path):
    temporary = ["step_9.pt.tmp", ".step_9.pt", "step_9.pt.partial", "tmp-checkpoint-9",
                 "step_9.tmp.4711", "step_9.pt~"]  # fmt: skip
    others = ["events.out.tfevents.1712", "llama2.yaml", "train_2026-08-03.log", "2026-08-03.log"]
    assert newest(tmp_path, *temporary, *others) == ""


def test_latest_is_preferred_and_followed(tmp_path: Path):
    for name in ("step_1.pt", "step_2.pt"):
        (tmp_path / name).write_bytes(b"x")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_2.pt"
    (tmp_path / "latest").symlink_to("step_1.pt")
    assert resolve_resume_path(tmp_path) == tmp_path / "step_1.pt"
    (tmp_path / "step_1.pt").unlink()
    assert resolve_resume_path(tmp_path) == tmp_path / "step_2.pt"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("step_1")  # a note, as some frameworks leave it
    assert resolve_resume_path(tmp_path) == tmp_path / "step_2.pt"


def test_what_was_not_written_to_its_end_is_passed_over(tmp_path: Path):
    assert resolve_resume_path(tmp_path) is None
    assert resolve_resume_path(tmp_path / "missing") is None
    (tmp_path / "step_4.pt").write_bytes(b"")
    (tmp_path / "checkpoint-3").mkdir()
    shards = tmp_path / "step-2"
    shards.mkdir()
    (shards / "__0_0.distcp").write_bytes(b"x")
    assert resolve_resume_path(tmp_path) is None
    (shards / ".metadata").write_bytes(b"x")
    assert resolve_resume_path(tmp_path) == shards




REAL_NAMES = {  # as programs leave them, oldest first; the last one but for `best` is the newest
    "nanoGPT": "ckpt.pt",
    "PyTorch's tutorial": "snapshot.pt",
    "minGPT-ddp": "gpt_snapshot.pt",
    "imagenet": "checkpoint.pth.tar model_best.pth.tar",
    "timm": "checkpoint-2.pth.tar checkpoint-3.pth.tar last.pth.tar model_best.pth.tar",
    "fairseq": "checkpoint1.pt checkpoint2.pt checkpoint_last.pt checkpoint_best.pt",
    "detectron2": "metrics.json last_checkpoint model_0000999.pth model_0004999.pth",
    "Composer": "ep0-ba10-rank0.pt ep1-ba20-rank1.pt ep1-ba20-rank0.pt",
    "Composer's latest": "latest-rank0.pt",
    "accelerate": "checkpoints/checkpoint_0/ checkpoints/checkpoint_1/",
    "diffusion": "model-99.pt model-100.pt",
    "OpenCLIP": "epoch_1.pt epoch_latest.pt",
    "a state": "state.pt",
    "Lightning's own requeue": "epoch=0-step=50.ckpt hpc_ckpt_1.ckpt",
    "Lightning after one": "hpc_ckpt_1.ckpt epoch=0-step=50.ckpt epoch=0-step=100.ckpt",
    "Megatron": "latest_checkpointed_iteration.txt iter_0000900/ iter_0001000/",
    "Hugging Face": "checkpoint-900/ checkpoint-1000/",
    "YOLO": "last.pt best.pt",
    "Keras": "checkpoint_99.keras checkpoint_100.keras",
    "Equinox": "checkpoint_99.eqx checkpoint_100.eqx",
    "Paddle": "epoch_2.pdparams epoch_3.pdparams",
    "TensorFlow": "ckpt-4.index ckpt-5.data-00000-of-00001 ckpt-5.index",
    "packed": "ckpt_99.pt.gz ckpt_100.pt.gz",
    "arrays": "step_99.npy step_100.npy",
    "steps with a dot": "ckpt_1.pt ckpt_1.5.pt",
    "steps of an epoch": "epoch_1.pt epoch_1.step_500.pt epoch_1.step_900.pt",
}


@pytest.mark.parametrize("names", REAL_NAMES.values(), ids=REAL_NAMES)
def test_the_names_that_programs_give_are_found(tmp_path: Path, names: str):
    for second, name in enumerate(names.split(), 1):
        write(tmp_path, name, second)
    *_, newest = (name for name in names.split() if "best" not in name)
    assert resolve_resume_path(tmp_path) == tmp_path / newest


def write(folder: Path, name: str, second: int) -> Path:
    """A file, or NAME/ a folder with one, written that many seconds after 1970."""
    path = folder / name
    file = path / "state" if name.endswith("/") else path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    for each in (file, path):
        os.utime(each, (second, second))
    return path


def test_of_one_kind_the_step_counts_and_the_others_follow_by_age(tmp_path: Path):
    for second, name in enumerate(("step_30.pt", "step_9.pt", "last.pt", "state.txt", "best.pt")):
        write(tmp_path, name, second)
    assert [path.name for path in resume_paths(tmp_path)] == ["last.pt", "step_30.pt", "step_9.pt"]


def test_what_comes_along_with_a_checkpoint_is_none(tmp_path: Path):
    """It is written last, and was taken for the newest kind of checkpoint."""
    for second, name in enumerate(("step_5.pt", "step_5.optimizer.pt", "step_5.ema.pt")):
        write(tmp_path, name, second)
    assert list(resume_paths(tmp_path)) == [tmp_path / "step_5.pt"]


def test_a_checkpoint_that_cannot_be_read_now_is_none_the_less_one(tmp_path: Path, monkeypatch):
    """A server that hiccups sent the program back to the step before."""
    for name in ("step_1.pt", "step_2.pt"):
        (tmp_path / name).write_bytes(b"x")
    real = Path.open

    def stale(self, *how):
        if self.name == "step_2.pt":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
        return real(self, *how)

    monkeypatch.setattr(Path, "open", stale)
    assert resolve_resume_path(tmp_path) == tmp_path / "step_2.pt"


def test_a_pattern_says_what_a_checkpoint_is(tmp_path: Path):
    for second, name in enumerate(("a/weights", "b/weights", "step_3.pt", ".weights")):
        write(tmp_path, name, second)
    assert resolve_resume_path(tmp_path, "*/weights") == tmp_path / "b" / "weights"
    assert resolve_resume_path(tmp_path, "odd*") is None


def test_folders_that_say_or_show_that_they_are_half_written_are_passed_over(tmp_path: Path):
    good = write(tmp_path, "checkpoint-100/", 1)
    write(tmp_path, "checkpoint-112/checkpoint-is-incomplete.txt", 2)
    write(tmp_path, "checkpoint-125/config.json", 3)
    write(tmp_path, "checkpoint-125/model.safetensors", 3)
    assert resolve_resume_path(tmp_path) == good
    write(tmp_path, "checkpoint-125/trainer_state.json", 3)
    assert resolve_resume_path(tmp_path) == tmp_path / "checkpoint-125"


def test_pictures_and_folders_without_tensors_are_no_checkpoints(tmp_path: Path):
    """The newest picture of the losses was handed to the program, which died of it."""
    good = write(tmp_path, "step_10.pt", 1)
    for second, name in enumerate(
        ("loss_step_20.png", "step_30.svg", "last.mp4", "latest.html", "epoch_4.wav",
         "step_20_samples/0.png", "last-run/events.out.tfevents.17.host", "epoch_9/loss.pdf"),
        2,
    ):  # fmt: skip
        write(tmp_path, name, second)
    assert list(resume_paths(tmp_path)) == [good]
    assert resolve_resume_path(tmp_path, "step_30.*") == tmp_path / "step_30.svg"


FIRST_FILES = {  # of a checkpoint that is cut short, and what the whole one has at last
    "FSDP": ("pytorch_model_fsdp_0/.metadata", "trainer_state.json"),
    "PEFT": ("adapter_model.safetensors", "trainer_state.json"),
    "shards": ("model-00001-of-00002.safetensors", "trainer_state.json"),
    "no transformer": ("model.safetensors", "trainer_state.json"),
    "accelerate": ("model.safetensors", "random_states_0.pkl"),
}


@pytest.mark.parametrize(("first", "last"), FIRST_FILES.values(), ids=FIRST_FILES)
def test_a_checkpoint_that_a_kill_cut_short_is_passed_over(tmp_path: Path, first: str, last: str):
    """The Trainer takes the weights that are there, and begins at step 0 without a word."""
    for name in (first, "optimizer.pt", last):
        write(tmp_path / "checkpoint-100", name, 1)
    write(tmp_path / "checkpoint-200", first, 2)
    assert list(resume_paths(tmp_path)) == [tmp_path / "checkpoint-100"]
    write(tmp_path / "checkpoint-200", last, 2)
    assert resolve_resume_path(tmp_path) == tmp_path / "checkpoint-200"


def test_shards_in_a_folder_of_a_checkpoint_need_their_metadata(tmp_path: Path):
    write(tmp_path / "step_3" / "optimizer", "__0_0.distcp", 1)
    assert resolve_resume_path(tmp_path) is None
    write(tmp_path / "step_3" / "optimizer", ".metadata", 1)
    assert resolve_resume_path(tmp_path) == tmp_path / "step_3"


def test_a_file_that_torch_has_not_written_to_its_end_is_passed_over(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "step_1.pt", "w") as file:
        file.writestr("archive/data.pkl", bytes(1000))
    whole = (tmp_path / "step_1.pt").read_bytes()
    (tmp_path / "step_2.pt").write_bytes(whole[:500])
    assert list(resume_paths(tmp_path)) == [tmp_path / "step_1.pt"]
