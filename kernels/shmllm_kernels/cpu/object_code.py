"""Compiles kernels to object code when they are first used, and caches it on disk.

The cache is ``shmllm/kernels`` in the user's cache directory. A file that cannot be read or is
damaged is compiled again; if a file cannot be written, a warning says so and the code is used
without it. This module must not know what kernels compute.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding, ir

from shmllm_kernels.cpu.language import Compiled, as_value
from shmllm_kernels.cpu.simd import FEATURES, INT64

logger = logging.getLogger("shmllm.kernels")  # an engine's log shows those below shmllm

Entry = tuple[Compiled, Sequence[str | int]]
"""A function, and the constants that are its last arguments."""

_HASH_BYTES = 32
_lock = threading.Lock()
_engines: list[Any] = []  # LLVM's execution engines, which own the machine code


def addresses_of(*entries: Entry) -> tuple[int, ...]:
    """Returns the addresses of compiled functions, which take and return int64."""
    with _lock:
        names = [f"entry{i}" for i in range(len(entries))]
        path = _cache_path(_key(entries))
        code = _read(path)
        if code is None:
            code = _compile(entries, names)
            _write(path, code)
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        return tuple(engine.get_function_address(name) for name in names)


# compiling


@functools.cache
def _machine() -> binding.TargetMachine:
    """Initialises LLVM and returns the target machine for this CPU."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()  # of inline assembly
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=FEATURES.flatten() + ",-prefer-256-bit", opt=3,
        codemodel="jitdefault", jit=True,
    )  # fmt: skip


def _add_entry(
    module: ir.Module, name: str, function: Compiled, constants: Sequence[str | int]
) -> None:
    """Adds a C function to the module: int64 arguments; it returns the result, or 0 if none."""
    from shmllm_kernels.cpu.translate import expand  # not imported if all code is in the cache

    count = len(function.tree.args.args) - len(constants)
    entry = ir.Function(module, ir.FunctionType(INT64, [INT64] * count), name)
    entry.attributes.add("nounwind")
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    result = expand(builder, function, [*entry.args, *constants])
    builder.ret(as_value(0 if result is None else result))


def _compile(entries: Sequence[Entry], names: Sequence[str]) -> bytes:
    code: bytes = _machine().emit_object(_optimized(entries, names, _machine()))
    return code


def _optimized(
    entries: Sequence[Entry], names: Sequence[str], machine: binding.TargetMachine
) -> binding.ModuleRef:
    """Returns the module of these functions, ready for the machine's code."""
    source = ir.Module("kernel")
    source.triple = binding.get_default_triple()
    for (function, constants), name in zip(entries, names, strict=True):
        _add_entry(source, name, function, constants)
    module = binding.parse_assembly(str(source))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


# caching


def _cache_path(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "shmllm" / "kernels" / key


@functools.cache
def _environment() -> bytes:
    """Returns a digest of everything that the object code depends on beside the function:
    LLVM's version, the CPU, and the sources of this package."""
    digest = hashlib.sha256()
    versions = llvmlite.__version__, binding.llvm_version_info
    machine = binding.get_host_cpu_name(), FEATURES.flatten(), binding.get_default_triple()
    digest.update(repr((versions, machine)).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


@functools.cache
def _digest_of_other_source(path: str) -> bytes:
    """Returns the digest of a file outside this package, and b"" for a file of this package."""
    is_here = Path(path).parent == Path(__file__).parent
    return b"" if is_here else hashlib.sha256(Path(path).read_bytes()).digest()


def _key(entries: Sequence[Entry]) -> str:
    digest = hashlib.sha256(_environment())
    for function, constants in entries:
        source = function.source
        digest.update(_digest_of_other_source(inspect.getfile(source)))
        digest.update(repr((source.__module__, source.__qualname__, tuple(constants))).encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> bytes | None:
    """Returns the code in a cache file, or None if the file is damaged, has code for another key,
    or is one that another user owns or may write.

    These checks protect a cache in a directory that other users may write: they can delete and
    rename the files there.
    """
    try:
        # A pipe under this name would block open(2) without O_NONBLOCK.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            if status.st_uid not in (0, os.getuid()):
                return None
            content = file.read()
    except OSError:
        return None
    code = content[_HASH_BYTES:]
    return code if _checksum(path.name, code) == content[:_HASH_BYTES] else None


def _checksum(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _write(path: Path, code: bytes) -> None:
    """Writes a cache file atomically, so that several processes may write it at once."""
    try:
        if not path.is_absolute():
            raise OSError("no home directory")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(_checksum(path.name, code) + code)
            os.replace(unfinished, path)
        except OSError:
            os.unlink(unfinished)
            raise
    except OSError as error:
        _warn_once(str(path.parent), str(error))


@functools.cache
def _warn_once(directory: str, reason: str) -> None:
    logger.warning(
        "cannot cache compiled kernels in %s (%s): every start compiles them", directory, reason
    )
