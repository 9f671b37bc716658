"""Notices, and the children of a process that hears them.

pytest tests/base/test_signals.py
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from elastic.base.signals import Notice
from helpers import PATIENCE, ROOT

START = """
import multiprocessing, os, signal, subprocess, sys, time
from elastic.base.signals import NOTICES, install
notice = install()
fork = multiprocessing.get_context("fork")
"""
A_POOL = """
with fork.Pool(2) as pool:
    print(pool.map(abs, [-1, 2]))
pool.join()
"""
ENDED_AT_ONCE = """
for _ in range(20):
    child = fork.Process(target=time.sleep, args=[600])
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode)
"""
# Slurm sends its notice to every process of a step.
A_NOTICE_TO_ALL = """
pool = fork.Pool(1)
waits = pool.apply_async(time.sleep, [1])
(before,) = fork.active_children()
for number in NOTICES:
    subprocess.run(["kill", f"-{number.value}", str(before.pid)])
waits.get(30)
print(fork.active_children() == [before], bool(notice))
pool.terminate()
pool.join()
"""
# Those of an executor are no daemons. The local scheduler's notice is to all of a group.
A_NOTICE_TO_THE_GROUP = """
import concurrent.futures
with concurrent.futures.ProcessPoolExecutor(1, mp_context=fork) as pool:
    waits = pool.submit(abs, -3)
    waits.result()
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True)
    print(pool.submit(abs, -4).result(), bool(notice))
"""
CLEANS_UP = """
def work():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    ready.set()
    while True:
        pass
ready = fork.Event()
child = fork.Process(target=work, daemon=True)
child.start()
ready.wait()
child.terminate()
child.join()
print(child.exitcode)
"""
A_FORK = """
if not (pid := os.fork()):
    time.sleep(600)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
OF_ITS_OWN = """
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
if not (pid := os.fork()):
    time.sleep(600)
os.kill(pid, signal.SIGUSR1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
EXECUTED = """
child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)
child.terminate()
print(child.wait())
"""


@pytest.mark.parametrize(
    ("story", "said"),
    [(A_POOL, "[1, 2]\n"), (ENDED_AT_ONCE, "-15\n" * 20), (A_NOTICE_TO_ALL, "True False\n"),
     (A_NOTICE_TO_THE_GROUP, "4 True\n"), (CLEANS_UP, "3\n"), (A_FORK, "-15\n"),
     (OF_ITS_OWN, "7\n"), (EXECUTED, "-15\n")],
    ids=["pool", "ended at once", "a notice to all", "a notice to its group", "cleans up",
         "fork", "a handler of its own", "executed"],
)
def test_a_child_is_ended_by_its_parent_and_by_no_notice(story: str, said: str):
    """A multiprocessing.Pool waited for ever for children that took TERM for a notice."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + story], env={"PYTHONPATH": str(ROOT / "lib")},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    try:
        assert process.communicate(timeout=20 * PATIENCE)[0] == said
        assert process.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # its children, too, where it has failed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_notice_that_is_on_its_way_is_waited_for():
    notice = Notice()
    notice.wait(0.01)
    assert not notice
    on_its_way = threading.Timer(0.1, notice.arrived, [signal.SIGTERM])
    on_its_way.start()
    notice.wait(60)
    assert notice.signal_name == "SIGTERM"
    on_its_way.join()
