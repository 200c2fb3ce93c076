"""Whether this process may use AMX, the matrix instructions of Intel's server CPUs.

Linux gives the 8 KiB of tile registers only to processes that ask for them. This module asks when
it is imported: all threads of the process, and the processes that it forks, may then use them. The
sources are the "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter
18, and "Using XSTATE features in user space applications" in Linux's documentation.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable

_ARCH_PRCTL = 158  # the number of the system call on x86-64
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18

FLAGS = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"}
"""The flags in /proc/cpuinfo of a CPU that has AMX, and LLVM's names of these features. LLVM does
not find them on all virtual machines."""


def lists_amx(cpuinfo: Iterable[str]) -> bool:
    """Whether the lines of /proc/cpuinfo have all FLAGS."""
    for line in cpuinfo:
        name, _, flags = line.partition(":")
        if name.strip() == "flags":
            return set(flags.split()) >= set(FLAGS)
    return False


_IS_X86 = platform.machine() == "x86_64"


def _cpu_has_amx() -> bool:
    if platform.system() != "Linux" or not _IS_X86:
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return lists_amx(file)
    except OSError:
        return False


def _is_permitted() -> bool:
    """Asks Linux for the tile registers; a kernel without them, a sandbox, or a thread with a small
    alternate signal stack makes it refuse."""
    system_call = ctypes.CDLL(None).syscall
    system_call.restype = ctypes.c_long
    request = ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_long(_XFEATURE_XTILEDATA)
    granted: bool = system_call(ctypes.c_long(_ARCH_PRCTL), *request) == 0
    return granted


HAS_AMX = _cpu_has_amx() and _is_permitted()
"""Whether this process may multiply bfloat16 and int8 by tiles."""
FEATURES = dict.fromkeys(FLAGS.values(), HAS_AMX) if _IS_X86 else {}
"""LLVM's features for AMX, and whether code for this process may use them."""
