"""A TCP connection (a line) to every node of a synchronous job, by which the kernel sees
that a node is gone.

A node that loses its power says nothing. The other ranks then wait as long as NCCL or
Gloo do, ten minutes, and Slurm five. So sbatch/rank.sh, once on each node, opens a
connection to the launcher and keeps it while the ranks live. Neither side sends anything
after the first word but TCP's keepalive probes, and if they stay without an answer for
40 s, the line ends with a time-out. A line that is closed means nothing here: srun says
how ranks end.
"""

import contextlib
import errno
import secrets
import socket

IDLE_S, EVERY_S, PROBES = 10, 10, 3
WORD_BYTES = 128
MOST_SILENT = 256  # lines that have not said the first word: anybody can open some
GONE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}


class Keepalive:
    """Listens on `address`; `place` is what a node needs to call: HOST:PORT:PASSWORD."""

    def __init__(self, address: str):
        self._server = socket.create_server((address, 0), backlog=1024)
        self._server.setblocking(False)
        self._password = secrets.token_hex(16)
        self.place = f"{address}:{self._server.getsockname()[1]}:{self._password}"
        # By connection, the node at its other end; "" until it has said its name.
        self._lines: dict[socket.socket, str] = {}

    def lost(self) -> str:
        """The name of a node that was there and is gone; "" if there is none. Never
        waits."""
        with contextlib.suppress(OSError):  # nobody else calls
            while True:
                self._lines[_kept_alive(self._server.accept()[0])] = ""
        for line in list(self._lines):
            if (node := self._hear(line)) is not None:
                return node
        for line in [line for line, node in self._lines.items() if not node][:-MOST_SILENT]:
            self._drop(line)
        return ""

    def _hear(self, line: socket.socket) -> str | None:
        """Read what a line has to say. Returns the name of its node if the line has timed
        out, else None; a line that was closed is dropped."""
        try:
            password, _, node = line.recv(WORD_BYTES).decode(errors="replace").partition(" ")
        except BlockingIOError:
            return None
        except OSError as error:
            node = self._drop(line)
            return node if error.errno in GONE and node else None
        if password == self._password:
            self._lines[line] = node.strip()
        else:
            self._drop(line)
        return None

    def _drop(self, line: socket.socket) -> str:
        line.close()
        return self._lines.pop(line)

    def close(self) -> None:
        """End all lines, and so the processes that hold them on the nodes."""
        for connection in (self._server, *self._lines):
            connection.close()
        self._lines.clear()


def _kept_alive(line: socket.socket) -> socket.socket:
    line.setblocking(False)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    return line
