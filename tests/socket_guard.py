"""Record and refuse each attempt of a Python process to reach another machine. Tests put this file on PYTHONPATH as
`sitecustomize.py`.

An attempt is a connection, a datagram, or a lookup of the address of another machine. In the folder SOCKET_GUARD, the
file `loaded` gets a line with the arguments of each watched process, and `attempts` gets a line for each attempt.
Traffic within the machine is allowed. Code that is not Python is not watched.
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


def is_on_this_machine(host: str | bytes | None) -> bool:
    """Return whether a name or an address belongs to this machine: a process can only listen on such addresses."""
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


def refuse(operation: str, host: object) -> None:
    write("attempts", f"{operation} {host!r} by {sys.argv}")
    raise ConnectionRefusedError(f"socket guard: {operation} {host!r}")


def guarded_connect(self: socket.socket, address: object) -> None:
    # `sendto` checks datagrams
    if self.family in INTERNET and self.type != socket.SOCK_DGRAM and not is_on_this_machine(address[0]):
        refuse("connect", address)
    return connect(self, address)


def guarded_connect_ex(self: socket.socket, address: object) -> int:
    if self.family in INTERNET and not is_on_this_machine(address[0]):
        refuse("connect", address)
    return connect_ex(self, address)


def guarded_sendto(self: socket.socket, data: bytes, *flags_and_address: object) -> int:
    address = flags_and_address[-1]
    if self.family in INTERNET and not is_on_this_machine(address[0]):
        refuse("sendto", address)
    return sendto(self, data, *flags_and_address)


def guarded_getaddrinfo(host: str | bytes | None, *arguments: object, **options: object) -> list:
    if not is_on_this_machine(host):
        refuse("getaddrinfo", host)
    return getaddrinfo(host, *arguments, **options)


def guarded_gethostbyname(host: str) -> str:
    if not is_on_this_machine(host):
        refuse("gethostbyname", host)
    return gethostbyname(host)


socket.socket.connect = guarded_connect
socket.socket.connect_ex = guarded_connect_ex
socket.socket.sendto = guarded_sendto
socket.getaddrinfo = guarded_getaddrinfo
socket.gethostbyname = guarded_gethostbyname
write("loaded", " ".join(Path(f"/proc/{os.getpid()}/cmdline").read_text().split("\0")))
