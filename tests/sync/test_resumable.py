"""Which checkpoint a program is resumed from, by the names and the content of files.

pytest tests/sync/test_resumable.py
"""

import errno
import os
import zipfile
from pathlib import Path

import pytest

from elastic.sync.resumable import resolve_resume_path, resume_paths


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
                 "step_9.tmp.4711", "step_9.pt~"]
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
    ):
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
