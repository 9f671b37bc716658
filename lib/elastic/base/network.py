"""Which IPv4 address of this machine others can reach.

The site may name it, as an address or as an interface. Else it is the address by which
the scheduler knows this node, else the one that routes to others. No interface's name is
ever guessed.
"""

import contextlib
import fcntl
import ipaddress
import os
import random
import socket
import struct
import sys
from pathlib import Path

from elastic.base.environment import env
from elastic.base.errors import ElasticError

ELSEWHERE = "192.0.2.1"  # RFC 5737: documentation, never a real host
SIOCGIFADDR = 0x8915  # linux/sockios.h
IFF_UP = 1  # linux/if.h
PORTS = range(10_000, 32_000)  # below those that the kernel hands out to clients
LISTEN = "0A"  # linux/tcp_states.h, as /proc/net/tcp has it
HINT = "set redis.bind and sync.bind to an address or an interface in etc/site.toml"


def bind_address(wanted: str, node_address: str, key: str = "redis.bind") -> str:
    """The IPv4 address to listen on. `wanted`: "auto", an address, or an interface's
    name, by the setting `key`.

    Raises ElasticError naming the interfaces there are.
    """
    if wanted == "auto":
        address = resolve(node_address)
        # Debian's /etc/hosts gives a machine's own name a loopback address.
        named = not node_address.startswith("127.") and node_address != "localhost"
        return routed() if named and address.startswith("127.") else address
    if wanted in interfaces():
        return interfaces()[wanted]
    try:
        return str(ipaddress.IPv4Address(wanted))
    except ValueError:
        known = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        what = f"{key} = {wanted!r} is no IPv4 address and no interface here"
        raise ElasticError(what, f"interfaces with an IPv4 address: {known}") from None


def interfaces() -> dict[str, str]:
    """Interface name -> its IPv4 address; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


def is_up(interface: str) -> bool:
    """Is the interface switched on? Its cable may be out."""
    flags = Path(f"/sys/class/net/{interface}/flags")
    return bool(int(flags.read_text(), 16) & IFF_UP) if flags.exists() else False


def resolve(host: str) -> str:
    """The IPv4 address of `host`. Raises ElasticError."""
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        what = f"this node's name {host!r} has no IPv4 address: {error}"
        raise ElasticError(what, HINT) from None


def routed(to: str = "") -> str:
    """The address that packets to another machine come from. Raises ElasticError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to or ELSEWHERE, 9))  # sends nothing
        except OSError as error:
            what = f"no route from this node to others: {error.strerror}"
            raise ElasticError(what, HINT) from None
        return probe.getsockname()[0]


def free_ports(address: str, count: int = 1) -> list[int]:
    """TCP ports on `address` ("": on all) on which nobody listens now. The kernel gives
    them to no client: a server may use one half a minute later."""
    ports = []
    # A generator of its own: two processes that have seeded `random` alike draw alike.
    for port in random.Random().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError):
            socket.create_server((address, port)).close()
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def free_port(address: str) -> int:
    return free_ports(address)[0]


def listens(address: str, port: int) -> bool:
    """Does a process of this user listen there? The kernel says so: other users cannot
    pretend to be this one."""
    place = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    return any(row[1] == place and row[3] == LISTEN and row[7] == str(os.getuid()) for row in rows)


def node_name() -> str:
    """Slurm's name of this machine; outside of a job the machine's own, which may differ."""
    return env("SLURMD_NODENAME") or socket.gethostname()
