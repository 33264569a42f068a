"""Put on PYTHONPATH as `sitecustomize.py`, this writes down and refuses each attempt of a Python process to leave the
machine: a connection, a datagram, or a question for the address of another machine.

The folder that SOCKET_GUARD names gets `loaded`, a line for each process that is watched (its arguments), and
`attempts`, a line for each attempt. What stays on the machine passes. Code that is not Python is not seen.
"""

import os
import socket
import sys
from pathlib import Path

FOLDER = Path(os.environ["SOCKET_GUARD"])
OWN_NAMES = {None, "", "localhost", "0.0.0.0", "::", socket.gethostname(), socket.getfqdn()}
INTERNET = (socket.AF_INET, socket.AF_INET6)

connect = socket.socket.connect
connect_ex = socket.socket.connect_ex
sendto = socket.socket.sendto
getaddrinfo = socket.getaddrinfo
gethostbyname = socket.gethostbyname


def write(file: str, line: str) -> None:
    with (FOLDER / file).open("a") as out:
        out.write(line.replace("\n", " ") + "\n")


def is_here(host: str | bytes | None) -> bool:
    """Whether a name or an address is this machine's own: one can listen on those alone."""
    host = host.decode() if isinstance(host, bytes) else host
    if host in OWN_NAMES:
        return True
    family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            socket.inet_pton(family, str(host))
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def refuse(what: str, host: object) -> None:
    write("attempts", f"{what} {host!r} by {sys.argv}")
    raise ConnectionRefusedError(f"socket guard: {what} {host!r}")


def guarded_connect(self: socket.socket, address: object) -> None:
    if self.family in INTERNET and self.type != socket.SOCK_DGRAM and not is_here(address[0]):  # a datagram: see sendto
        refuse("connect", address)
    return connect(self, address)


def guarded_connect_ex(self: socket.socket, address: object) -> int:
    if self.family in INTERNET and not is_here(address[0]):
        refuse("connect", address)
    return connect_ex(self, address)


def guarded_sendto(self: socket.socket, data: bytes, *rest: object) -> int:
    if self.family in INTERNET and not is_here(rest[-1][0]):
        refuse("sendto", rest[-1])
    return sendto(self, data, *rest)


def guarded_getaddrinfo(host: str | bytes | None, *rest: object, **named: object) -> list:
    if not is_here(host):
        refuse("getaddrinfo", host)
    return getaddrinfo(host, *rest, **named)


def guarded_gethostbyname(host: str) -> str:
    if not is_here(host):
        refuse("gethostbyname", host)
    return gethostbyname(host)


socket.socket.connect = guarded_connect
socket.socket.connect_ex = guarded_connect_ex
socket.socket.sendto = guarded_sendto
socket.getaddrinfo = guarded_getaddrinfo
socket.gethostbyname = guarded_gethostbyname
write("loaded", " ".join(Path(f"/proc/{os.getpid()}/cmdline").read_text().split("\0")))
