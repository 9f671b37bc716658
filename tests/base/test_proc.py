"""Processes as /proc shows them.

pytest tests/base/test_proc.py
"""

import os
import re
import subprocess
import sys

from elastic.base.proc import Process, abort, kill_all, read
from helpers import wait_until

LEADER_LEAVES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
HANGS = """
import time

def hangs(depth):
    hangs(depth - 1) if depth else time.sleep(60)

print(flush=True)
hangs(90)
"""


def test_a_process_whose_first_thread_has_ended_is_alive_until_the_last_one_has():
    child = subprocess.Popen([sys.executable, "-c", LEADER_LEAVES])
    try:
        wait_until(lambda: "State:\tZ" in read(f"/proc/{child.pid}/status"),
                   10, "the end of the first thread")
        assert Process.of(child.pid)
        kill_all(lambda: {child.pid})
        assert not Process.of(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not Process.of(child.pid)


def test_the_stacks_of_processes_that_share_a_pipe_do_not_mix():
    command = [sys.executable, "-X", "faulthandler", "-c", HANGS]
    reader, writer = os.pipe()
    pipes = {"stdout": subprocess.PIPE, "stderr": writer}
    children = [subprocess.Popen(command, **pipes) for _ in range(3)]
    os.close(writer)
    for child in children:
        child.stdout.readline()
    abort([child.pid for child in children])
    for child in children:
        child.communicate()
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    assert sum(bool(re.fullmatch(r'  File "<string>", line \d+ in hangs', line))
               for line in lines) == 3 * 91  # fmt: skip
