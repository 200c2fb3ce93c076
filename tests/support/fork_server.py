"""A process that has imported what engines import, and forks an engine for each request.

It runs as a source text, with the environment of an engine, so it imports nothing of the tests.
`support.forked_engines` starts it and describes the requests. It must start no thread, since none
would exist in the processes that it forks.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
from typing import Any

MODULES = (
    "shmllm.engine.program",
    "shmllm.worker.make_runner",
    "shmllm.worker.cpu.runner",
    "shmllm.parallel.cpu_rank",
    "shmllm.parallel.rank",
    "shmllm.config.processes",
)
FREE_DESCRIPTORS = 500  # from here on, no request has any
MAX_DESCRIPTORS = 64


def serve(connection: socket.socket) -> None:
    """Fork a process for each request, and reply with its pid, until the other end is closed."""
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would otherwise write to, and so copy, the pages of all objects
    while True:
        data, fds = _receive(connection)
        if not data:
            return
        request = json.loads(data)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.close(reader)
                os.close(writer)
                _become(request, fds)
            os.write(writer, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)  # so the new process has become a child of the subreaper
        connection.send(os.read(reader, 20))
        for fd in (reader, writer, *fds):
            os.close(fd)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(2**20, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    return data, list(fds)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Become the process of the request, as exec would, and run its module."""
    os.setsid()
    free = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FREE_DESCRIPTORS) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(free, request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir("/")
    _show(request["command"])
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    os._exit(1)  # not reached: the module ends the process


def _show(command: list[str]) -> None:
    """Show this command line in /proc, in place of the server's, which is longer."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, command))
    assert len(text) < end - begin
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
