"""The SIGBUS handler, each time in a process of its own: pytest keeps its own handler."""

from __future__ import annotations

import platform
import signal
import sys

import pytest
from support.programs import Completed, result_of, run_source

from shmllm.sigbus.bus_handler import ACTION_BYTES, HANDLERS, NUM_ENTRIES, TABLE_OFFSET

pytestmark = pytest.mark.skipif(
    platform.machine() not in HANDLERS, reason=f"no SIGBUS handler for {platform.machine()}"
)

PREFACE = """
import faulthandler, json, mmap, os, sys, threading
if not sys.argv[1:]:
    faulthandler.enable()
import numpy as np
from shmllm.sigbus import bus_guard
SIZE = 2**24
assert bus_guard.install() and bus_guard.install()
def mapped(nbytes=SIZE):
    fd = os.memfd_create("mapping")
    os.ftruncate(fd, nbytes)
    mapping = mmap.mmap(fd, nbytes)
    mapping[:] = b"7" * nbytes
    return fd, mapping
def guarded(nbytes=SIZE):
    fd, mapping = mapped(nbytes)
    return fd, mapping, bus_guard.guard(mapping)
def print_json(*values):
    print(json.dumps(values))
"""


def run(source: str, *arguments: str) -> Completed:
    return run_source(PREFACE + source, *arguments)


def check_killed(done: Completed) -> None:
    """Check that SIGBUS ended the process, with the traceback of faulthandler."""
    assert done.returncode == -signal.SIGBUS
    assert b"Fatal Python error: Bus error" in done.stderr
    assert b'File "<string>"' in done.stderr


def test_a_truncated_mapping_reads_as_zeros_and_another_one_stays() -> None:
    done = run(
        """
fd, first, guard = guarded()
_, second, other = guarded()
os.ftruncate(fd, mmap.PAGESIZE)
before = [first[0], guard.is_lost]
zeros = [first[SIZE - 1], first[0], guard.is_lost]
first[5] = 3
print_json(before, zeros, first[5], second[SIZE - 1], other.is_lost)
"""
    )
    assert result_of(done) == [[55, False], [0, 0, True], 3, 55, False]


def test_two_mappings_can_be_lost_one_after_the_other() -> None:
    done = run(
        """
all = [guarded() for _ in range(2)]
for fd, mapping, guard in all:
    os.ftruncate(fd, 0)
print_json([(mapping[7], guard.is_lost) for _, mapping, guard in all])
"""
    )
    assert result_of(done) == [[[0, True], [0, True]]]


IN_THREADS = """
import torch
torch.set_num_threads(4)
fd, mapping, guard = guarded()
os.ftruncate(fd, SIZE // 2)
source = torch.frombuffer(mapping, dtype=torch.uint8)
copies = [None] * 4
def copy(index):
    copies[index] = source.numpy().copy() if index % 2 else source.clone().numpy()
threads = [threading.Thread(target=copy, args=(i,)) for i in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print_json(guard.is_lost, [int(each[-1]) for each in copies], int(source.sum()))
"""


def test_copies_without_the_gil_and_in_compute_threads_continue() -> None:
    """Four threads copy at the same time; torch divides each of its copies among four more."""
    assert result_of(run(IN_THREADS)) == [True, [0, 0, 0, 0], 0]


def test_a_thread_that_faults_does_not_wait_for_the_gil() -> None:
    done = run(
        """
import ctypes
fd, mapping, guard = guarded(2 * mmap.PAGESIZE)
os.ftruncate(fd, 0)
target = ctypes.create_string_buffer(8)
array = np.frombuffer(mapping, np.uint8)
# The main thread keeps the GIL while it waits for the other thread's store.
libc, gil = ctypes.CDLL(None), ctypes.PyDLL(None)
semaphore = ctypes.create_string_buffer(32)
libc.sem_init(semaphore, 0, 0)
pthread = ctypes.c_ulong()
start = ctypes.cast(libc.strdup, ctypes.c_void_p)  # it reads the byte at its argument
gil.pthread_create(ctypes.byref(pthread), None, start, ctypes.c_void_p(array.ctypes.data))
gil.pthread_join(pthread, None)
print_json(guard.is_lost)
"""
    )
    assert result_of(done) == [True]


@pytest.mark.parametrize(
    "fault",
    [
        "mapping[0]",
        "os.kill(os.getpid(), 7)",
        "guard = bus_guard.guard(mapping); del guard; mapping.close(); del mapping; other[0]",
    ],
    ids=["another mapping", "a signal from outside", "a mapping whose guard has ended"],
)
def test_any_other_sigbus_ends_the_process_with_a_traceback(fault: str) -> None:
    done = run(
        f"""
guarded_fd, guarded_mapping, _ = guarded()
fd, mapping = mapped()
other = mmap.mmap(fd, SIZE)
os.ftruncate(fd, 0)
os.ftruncate(guarded_fd, 0)
guarded_mapping[0]
{fault}
"""
    )
    check_killed(done)


def test_the_default_action_without_faulthandler() -> None:
    done = run_source(
        """
        import mmap, os
        from shmllm.sigbus import bus_guard
        bus_guard.install()
        fd = os.memfd_create("mapping")
        os.ftruncate(fd, 4096)
        mapping = mmap.mmap(fd, 4096)
        os.ftruncate(fd, 0)
        mapping[0]
        """
    )
    assert done.returncode == -signal.SIGBUS
    assert done.stderr == b""


def test_the_handler_works_until_the_interpreter_has_ended() -> None:
    done = run(
        """
import ctypes
fd, mapping, guard = guarded()
pointer = np.frombuffer(mapping, np.uint8).ctypes.data
os.ftruncate(fd, 0)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
# libc calls it after Python has freed its modules.
strlen = ctypes.CDLL(None).strlen
ctypes.CDLL(None).__cxa_atexit(strlen, ctypes.c_void_p(pointer), None)
print_json(guard.is_lost)
""",
        "without faulthandler",  # which restores the action before at the interpreter's end
    )
    assert result_of(done) == [False]


def test_entries_are_used_again_and_their_number_is_limited() -> None:
    done = run(
        """
from shmllm.errors import SegmentError
for _ in range(300):
    fd, mapping, guard = guarded(4096)
    os.ftruncate(fd, 0)
    assert not guard.is_lost and mapping[0] == 0 and guard.is_lost
    os.close(fd)
del mapping
kept = []
try:
    while True:
        kept.append(guarded(4096))
except SegmentError as error:
    print_json(len(kept), str(error))
"""
    )
    count, message = result_of(done)
    assert count == NUM_ENTRIES
    assert f"{NUM_ENTRIES} segments" in message


def test_a_process_without_the_handler_guards_nothing() -> None:
    done = run_source(
        """
        import mmap
        from shmllm.sigbus import bus_guard
        print("null" if bus_guard.guard(mmap.mmap(-1, 4096)) is None else 1)
        """
    )
    assert result_of(done) is None


def test_the_code_is_what_an_assembler_makes_of_the_text() -> None:
    """LLVM is loaded in this process only for the machine that it runs on."""
    binding = pytest.importorskip("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    handler = HANDLERS[platform.machine()]
    lines = (line.partition("//")[0] for line in handler.assembly.splitlines())
    module = binding.parse_assembly("".join(f'module asm "{line}"\n' for line in lines))
    machine = binding.Target.from_default_triple().create_target_machine()
    assembled = binding.ObjectFileRef.from_data(machine.emit_object(module))
    assert [s.data() for s in assembled.sections() if s.name() == b".text"] == [handler.code]


@pytest.mark.parametrize("machine", HANDLERS)
def test_the_text_names_the_sizes_of_the_table(machine: str) -> None:
    text = HANDLERS[machine].assembly
    assert f"{TABLE_OFFSET:#x}" in text
    assert f"{TABLE_OFFSET + ACTION_BYTES:#x}" in text
    assert f" {NUM_ENTRIES * 24} " in text.replace("]", " ")
    assert sys.byteorder == "little"
