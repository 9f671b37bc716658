"""Processes as /proc shows them.

pytest tests/base/test_proc.py
"""

import subprocess
import sys

from elastic.base.proc import Process, kill_all, read
from helpers import wait_until

LEADER_LEAVES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
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
