"""Emits LLVM instructions on vectors of float32.

This module owns the vector width of this machine, loads that convert to float32, and sums over
lanes, which are always added in the same order, so that a sum depends on its operands alone. It
must not know what kernels compute.

Addresses are int64, strides are in bytes. Nothing is checked: the callers are responsible for the
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from llvmlite import binding, ir

from shmllm_kernels.cpu import amx

INT64 = ir.IntType(64)
INT32 = ir.IntType(32)
FLOAT = ir.FloatType()

FEATURES = binding.get_host_cpu_features()
FEATURES.update(amx.FEATURES)
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx") else 4
"""The number of float32 in a vector register of this machine."""
_OF_X86 = {16: "AVX512F", 8: "AVX2" if FEATURES.get("avx2") else "AVX", 4: "SSE2"}
INSTRUCTIONS = _OF_X86[LANES] if FEATURES.get("sse2") else "NEON"
"""The name of the instructions on these registers."""

NUM_REGISTERS = 16 if LANES == 8 else 32

STORED = {
    "float32": (FLOAT, 4),
    "float16": (ir.HalfType(), 2),
    "bfloat16": (ir.IntType(16), 2),
    "int8": (ir.IntType(8), 1),
}
"""The stored dtypes by name: the LLVM type, and the size in bytes."""


def function(builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Type]):
    """Returns the LLVM intrinsic or external function of that name."""
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, args), name)


PartialSums = tuple[ir.Value, list[int]]
"""A vector, and the lanes where partial sums of several vectors begin."""


class Emitter:
    """Emits vector instructions.

    Args:
        builder: the builder of the function that gets the instructions.
        lanes: the number of lanes of every vector.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int = LANES) -> None:
        self.builder = builder
        self.lanes = lanes
        self.vector = ir.VectorType(FLOAT, lanes)
        self.integers = ir.VectorType(INT32, lanes)

    # numbers

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(INT64, value)

    def zeros(self) -> ir.Constant:
        return ir.Constant(self.vector, [0.0] * self.lanes)

    def splat_int(self, value: int) -> ir.Constant:
        return ir.Constant(self.integers, [value] * self.lanes)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        """Copies a float to every lane."""
        undef = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undef, scalar, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(one, undef, self.splat_int(0))

    # memory

    def at(self, address: ir.Value, offset: ir.Value | int) -> ir.Value:
        """Returns address + offset, in bytes."""
        if isinstance(offset, int):
            offset = self.const(offset)
        return self.builder.add(address, offset)

    def load(self, address: ir.Value, stored: str = "float32") -> ir.Value:
        """Loads `lanes` consecutive numbers as float32."""
        kind, num_bytes = STORED[stored]
        pointer = self.builder.inttoptr(address, ir.VectorType(kind, self.lanes).as_pointer())
        return self._widened(self.builder.load(pointer, align=num_bytes), stored)

    def load_first(self, address: ir.Value, count: ir.Value, stored: str = "float32") -> ir.Value:
        """Loads `count` consecutive numbers as float32; the other lanes are zero. It does not read
        memory after them."""
        kind, num_bytes = STORED[stored]
        bits = self.load_first_bits(address, count, 8 * num_bytes)
        is_integer = isinstance(kind, ir.IntType)
        read = bits if is_integer else self.builder.bitcast(bits, ir.VectorType(kind, self.lanes))
        return self._widened(read, stored)

    def load_first_bits(self, address: ir.Value, count: ir.Value, num_bits: int) -> ir.Value:
        """Loads `count` consecutive integers of so many bits; the other lanes are zero. It does not
        read memory after them."""
        if num_bits >= 32 or LANES == 16:
            return self._load_masked(address, count, num_bits)
        # AVX2 has no masks for those: LLVM tests each lane.
        b, kind = self.builder, ir.VectorType(ir.IntType(num_bits), self.lanes)
        whole, some, done = (b.append_basic_block(name) for name in ("whole", "some", "done"))
        b.cbranch(b.icmp_signed(">=", count, self.const(self.lanes)), whole, some)
        b.position_at_end(whole)
        pointer = b.inttoptr(address, kind.as_pointer())
        all_of_them = b.load(pointer, align=num_bits // 8)
        b.branch(done)
        b.position_at_end(some)
        first_of_them = self._load_masked(address, count, num_bits)
        b.branch(done)
        b.position_at_end(done)
        joined = b.phi(kind)
        joined.add_incoming(all_of_them, whole)
        joined.add_incoming(first_of_them, some)
        return joined

    def _load_masked(self, address: ir.Value, count: ir.Value, num_bits: int) -> ir.Value:
        vector = ir.VectorType(ir.IntType(num_bits), self.lanes)
        mask_type = ir.VectorType(ir.IntType(1), self.lanes)
        name = f"llvm.masked.load.v{self.lanes}i{num_bits}.p0"
        pointer_type = vector.as_pointer()
        load = function(self.builder, name, vector, [pointer_type, INT32, mask_type, vector])
        nothing = ir.Constant(vector, [0] * self.lanes)
        pointer = self.builder.inttoptr(address, pointer_type)
        align = ir.Constant(INT32, num_bits // 8)
        return self.builder.call(load, [pointer, align, self.first(count), nothing])

    def first(self, count: ir.Value) -> ir.Value:
        """Returns a mask of the first `count` lanes."""
        lanes = ir.Constant(self.integers, list(range(self.lanes)))
        narrow = self.builder.trunc(count, INT32)
        undef = ir.Constant(self.integers, ir.Undefined)
        one = self.builder.insert_element(undef, narrow, ir.Constant(INT32, 0))
        counts = self.builder.shuffle_vector(one, undef, self.splat_int(0))
        return self.builder.icmp_signed("<", lanes, counts)

    def load_scalar(self, address: ir.Value) -> ir.Value:
        """Loads one float32."""
        return self.builder.load(self.builder.inttoptr(address, FLOAT.as_pointer()), align=4)

    def load_word(self, address: ir.Value) -> ir.Value:
        """Loads one int64."""
        return self.builder.load(self.builder.inttoptr(address, INT64.as_pointer()), align=8)

    def store_first(self, value: ir.Value, address: ir.Value, count: ir.Value | int) -> None:
        """Stores the first `count` lanes as float32."""
        mask_type = ir.VectorType(ir.IntType(1), self.lanes)
        pointer_type = self.vector.as_pointer()
        arguments = [self.vector, pointer_type, INT32, mask_type]
        name = f"llvm.masked.store.v{self.lanes}f32.p0"
        store = function(self.builder, name, ir.VoidType(), arguments)
        pointer = self.builder.inttoptr(address, pointer_type)
        mask = self.first(self.const(count) if isinstance(count, int) else count)
        self.builder.call(store, [value, pointer, ir.Constant(INT32, 4), mask])

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """Stores a vector of float32 or one float32."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def prefetch(self, address: ir.Value) -> None:
        """Prefetches the cache line at an address. Any address is allowed, even an invalid one."""
        byte = ir.IntType(8).as_pointer()
        fetch = function(self.builder, "llvm.prefetch.p0", ir.VoidType(), [byte, *[INT32] * 3])
        arguments = [ir.Constant(INT32, number) for number in (0, 2, 1)]
        self.builder.call(fetch, [self.builder.inttoptr(address, byte), *arguments])

    def _widened(self, value: ir.Value, stored: str) -> ir.Value:
        if stored == "float32":
            return value
        if stored == "float16":
            return self.builder.fpext(value, self.vector)
        if stored == "int8":
            return self.builder.sitofp(value, self.vector)
        wide = self.builder.zext(value, self.integers)
        return self.builder.bitcast(self.builder.shl(wide, self.splat_int(16)), self.vector)

    # arithmetic

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Returns a * b + c, rounded once."""
        name = f"llvm.fma.v{self.lanes}f32"
        return self.builder.call(
            function(self.builder, name, self.vector, [self.vector] * 3), [a, b, c]
        )

    def sum(self, vector: ir.Value) -> ir.Value:
        """Returns the sum over the lanes as a float, added in the order of `sums`."""
        return self.builder.extract_element(self.sums([vector], 1)[0], ir.Constant(INT32, 0))

    def sums(self, vectors: Sequence[ir.Value], group: int) -> list[ir.Value]:
        """Sums each vector, of float32 or int32, over its lanes; returns vectors with `group` sums
        in the first lanes.

        Lane i is added to lane i + lanes / 2, and so on by halves: the order of additions does not
        depend on the number of vectors. Two vectors share each addition.
        """
        # Each entry is a vector, and the lanes where its members' partial sums begin.
        entries = [(vector, [0]) for vector in vectors]
        width = self.lanes
        while width > 1:
            width //= 2
            pairs = zip_longest(entries[::2], entries[1::2])
            entries = [self._halve(first, second, width) for first, second in pairs]
        places = [(vector, start) for vector, starts in entries for start in starts]
        return [
            self._collect(places[begin : begin + group]) for begin in range(0, len(places), group)
        ]

    def _collect(self, places: Sequence[tuple[ir.Value, int]]) -> ir.Value:
        """Gathers single lanes of at most two vectors into one vector."""
        first, last = places[0][0], places[-1][0]
        lanes = [start if vector is first else self.lanes + start for vector, start in places]
        lanes += [0] * (self.lanes - len(lanes))
        mask = ir.Constant(self.integers, lanes)
        return self.builder.shuffle_vector(first, last, mask)

    def _halve(self, a: PartialSums, b: PartialSums | None, width: int) -> PartialSums:
        """Adds the halves, of `width` lanes, of each partial sum.

        A sum takes the place of its lower half if it is of `a`, and of its upper half if it is of
        `b`: one half of each stays where it is, so that a single shuffle moves the others.
        """
        second, starts = (ir.Constant(a[0].type, ir.Undefined), []) if b is None else b
        of_b = [bool(starts and lane & width) for lane in range(self.lanes)]
        kept = [lane + self.lanes * other for lane, other in enumerate(of_b)]
        # Lanes that nobody reads are exchanged, too: LLVM 22.1 takes lanes 0 and 1 for the first of
        # <2, 3, 2, 3, 4, 5, ...>.
        moved = [lane ^ width for lane in kept]
        halves = [
            self.builder.shuffle_vector(a[0], second, ir.Constant(self.integers, lanes))
            for lanes in (kept, moved)
        ]
        add = self.builder.fadd if a[0].type == self.vector else self.builder.add
        return add(*halves), [*a[1], *(start + width for start in starts)]


class Loop:
    """A counted loop. The caller emits its body between ``begin`` and ``end``; it runs at least
    once.

    ``begin`` takes the initial values of the loop-carried variables, `values` has them inside the
    body, and ``end`` takes their values for the next iteration.
    """

    def __init__(self, emit: Emitter, start: ir.Value, stop: ir.Value, step: int) -> None:
        self.emit, self.stop, self.step = emit, stop, step
        self.start = start

    def begin(self, initial: Sequence[ir.Value]) -> None:
        b = self.emit.builder
        entry = b.block
        self.body = b.append_basic_block("body")
        b.branch(self.body)
        b.position_at_end(self.body)
        self.index = b.phi(INT64)
        self.index.add_incoming(self.start, entry)
        self.values = [b.phi(value.type) for value in initial]
        for phi, value in zip(self.values, initial, strict=True):
            phi.add_incoming(value, entry)

    def end(self, values: Sequence[ir.Value]) -> None:
        b = self.emit.builder
        following = b.add(self.index, ir.Constant(INT64, self.step))
        self.index.add_incoming(following, b.block)
        for phi, value in zip(self.values, values, strict=True):
            phi.add_incoming(value, b.block)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", following, self.stop), self.body, after)
        b.position_at_end(after)
