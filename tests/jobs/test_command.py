"""Any program in sync mode: what it is told, and that it comes back where it was.

pytest tests/jobs/test_command.py
"""

import re
import sys

import pytest

from elastic.base.errors import UsageError
from elastic.jobs.command import expand
from running import TESTS, Running, running

SCRIPT = TESTS / "plain_ddp.py"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes={nodes}",
    "--nproc-per-node={gpus_per_node}", "--rdzv-backend=c10d",
    "--rdzv-endpoint={master_addr}:{master_port}", str(SCRIPT),
    "--checkpoint_dir", "{checkpoints}", "--resume", "{resume}",
]


def test_names_in_braces_are_replaced_and_others_refused():
    values = {"resume": "/c/step_3.pt", "gpus": "4"}
    assert expand(["a", "{gpus}", "--x={gpus}:{resume}"], values) == [
        "a", "4", "--x=4:/c/step_3.pt",
    ]
    with pytest.raises(UsageError, match="{size}"):
        expand(["a", "{size}"], values)


def test_a_shells_variable_is_refused_with_the_way_out():
    with pytest.raises(UsageError, match=r"\$\{resume\}") as raised:
        expand(["bash", "-c", "x ${resume}"], {"resume": "a"})
    assert "$NAME" in raised.value.hint
    assert expand(["echo", "${HOME} $x {}"], {}) == ["echo", "${HOME} $x {}"]


def test_a_flag_is_there_where_there_is_something_to_resume():
    command = ["a", "-x", "{resume?--init_from=resume}", "b"]
    assert expand(command, {"resume": "/c/ckpt.pt"}) == ["a", "-x", "--init_from=resume", "b"]
    assert expand(command, {"resume": ""}) == ["a", "-x", "b"]


@pytest.mark.parametrize(
    ("command", "first"),
    [(["a", "--resume", "{resume}", "b"], ["a", "b"]), (["a", "--resume={resume}"], ["a"]),
     (["a", "{resume}"], ["a"]), (["a", "b"], ["a", "b"])],
)
def test_without_a_checkpoint_the_option_that_names_it_is_left_out(command, first):
    assert expand(command, {"resume": ""}) == first


def epochs(run: Running) -> list[tuple[int, int]]:
    """(epoch, ranks) as the script printed them."""
    log = run.run.log_path("trainer", 0)
    text = log.read_text() if log.exists() else ""
    return [(int(a), int(b)) for a, b in re.findall(r"epoch (\d+) of (\d+) ranks", text)]


def test_an_ordinary_ddp_script_under_torchrun_is_preempted_and_finishes(tmp_path, monkeypatch):
    """Without torchrun: test_programs.py."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder there
    hurry = tmp_path / "hurry"
    settings = {"run.mode": "sync", "run.command": [*TORCHRUN, "--hurry", str(hurry)],
                "elastic.max": 2, "sync.ranks_per_node": 1, "local_scheduler.gpus": 2}
    with running(tmp_path, settings) as run:
        run.until(lambda: len(epochs(run)) >= 2, 60, "two epochs")
        job = run.jobs()["trainer", 0]
        run.set_capacity(1)
        run.scheduler.preempt(job.job_id)
        assert run.ended(job.job_id)["outcome"] == "yielded"
        hurry.touch()
        run.until(lambda: run.run.done() and not run.jobs(), 90, "the end of the run")
        told = epochs(run)
    assert {epoch for epoch, _ in told} == set(range(12))
    assert len(told) <= 12 + 2  # an epoch may have been printed and not saved
    assert {ranks for _, ranks in told} == {1, 2}
