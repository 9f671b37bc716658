"""Processes as /proc shows them.

pytest tests/base/test_proc.py
"""

import os
import re
import subprocess
import sys
import time

from elastic.base.proc import STACKS_S, Process, abort, kill_all, read
from helpers import wait_until

LEADER_LEAVES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
# Each waits for the next one's end, as ranks notice that a peer has gone.
HANGS = """
import os, sys

def hangs(depth):
    if depth:
        hangs(depth - 1)
    else:
        print(flush=True)
        os.read(int(sys.argv[1]), 1)

hangs(90)
print("peer gone", file=sys.stderr)
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
    lines = [os.pipe() for _ in range(3)]
    children = []
    for number, (ears, _) in enumerate(lines):
        mouth = lines[number - 1][1]
        children.append(subprocess.Popen([*command, str(ears)], stdout=subprocess.PIPE,
                                         stderr=writer, pass_fds=(ears, mouth)))
    for descriptor in (writer, *sum(lines, ())):
        os.close(descriptor)
    try:
        for child in children:
            child.stdout.readline()
        abort([child.pid for child in children])
    finally:
        for child in children:
            child.kill()
            child.communicate()
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    found = re.findall(r'(?m)^  File "<string>", line \d+ in hangs$', said)
    assert (len(found), "peer gone" in said) == (3 * 91, False), said


def test_who_ignores_it_is_neither_stopped_nor_waited_for():
    """The copies of what ranks say: they have to copy the stacks."""
    command = "trap '' ABRT; echo; while read -r line; do echo \"$line\"; done"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(["sh", "-c", command], text=True, **pipes)
    try:
        child.stdout.readline()
        began = time.monotonic()
        abort([child.pid])
        assert time.monotonic() - began < STACKS_S
        assert child.communicate("still there\n", timeout=20) == ("still there\n", None)
    finally:
        child.kill()
        child.wait()
