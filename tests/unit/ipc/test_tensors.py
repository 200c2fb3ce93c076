from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmllm.errors import (
    IpcTimeoutError,
    MessageTooLargeError,
    NoSpaceError,
    ProtocolMismatchError,
)
from shmllm.ipc import layout
from shmllm.ipc.layout import SlotClass, SlotLayout
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotRef, SlotWriter
from shmllm.ipc.states import SegmentKind
from shmllm.ipc.tensor_ref import DTYPES, MAX_DIMENSIONS, REF_BYTES
from shmllm.ipc.tensors import TensorReader, TensorRef, TensorWriter

SLOT = 64 * 1024
LAYOUT = SlotLayout(table_offset=0, classes=(SlotClass(4096, 3, SLOT, SLOT, True),))
TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}
NUMPY_DTYPES = [name for name, dtype in DTYPES.items() if not dtype.is_pattern]


class Ends:
    """A writer and a reader of slots in ordinary memory."""

    def __init__(self) -> None:
        memory = memoryview(bytearray(4096 + 3 * SLOT))
        self.slots = SlotWriter(memory, LAYOUT, lambda *_: None, lambda *_: None)
        self.slots_read = SlotReader(memory, LAYOUT)
        self.writer = TensorWriter(self.slots)
        self.reader = TensorReader(self.slots_read)

    def send(self, source: object) -> TensorRef:
        """Put a tensor into a slot; returns its reference after encoding and decoding."""
        ref = self.writer.try_put(source)
        assert ref is not None
        return TensorRef.decode(ref.encode())


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    if ends.reader.num_held:
        gc.collect()
    assert ends.reader.num_held == 0
    ends.slots.check_integrity()


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits, which may be NaN or infinite."""
    high = 2 if dtype is torch.bool else 256
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.random.default_rng(7).integers(0, high, count, dtype=np.uint8))
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in row-major order, which are comparable even for NaN."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


SOURCES = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "strided": lambda t: t[::2, 1:, ::3],
    "expanded": lambda t: t[:1].expand(5, -1, -1),
    "scalar": lambda t: t[1, 2, 3],
    "empty": lambda t: t[:, :0],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("arrangement", SOURCES)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch_arrives_bit_for_bit(ends: Ends, name: str, arrangement: str) -> None:
    source = SOURCES[arrangement](random_tensor(TORCH_DTYPES[name], 4, 5, 6))
    ref = ends.send(source)
    assert (ref.dtype, ref.shape) == (name, tuple(source.shape))
    with ends.reader.view(ref) as view:
        tensor, array = view.torch(), view.numpy()
        assert tensor.dtype is source.dtype
        assert tensor.shape == source.shape == array.shape
        assert array.dtype == DTYPES[name].numpy
        assert bits(tensor) == bits(source) == array.tobytes()
        if source.numel():
            assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_arrays_arrive_with_any_strides_and_byte_order(ends: Ends, name: str) -> None:
    array = random_tensor(TORCH_DTYPES[name], 4, 5, 6).numpy()
    swapped = array.astype(array.dtype.newbyteorder())
    for source in (array, array.T, array[::-1, ::-2], array[1, 2, 3], array[:0], swapped):
        with ends.reader.view(ends.send(source)) as view:
            received = view.numpy()
            assert received.dtype == array.dtype
            assert np.array_equal(received, source, equal_nan=name.startswith(("float", "comp")))
            del received


def test_dtypes_of_ml_dtypes_arrive_under_their_name(ends: Ends) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)[:, ::-1]
    with ends.reader.view(ends.send(source)) as view:
        assert view.dtype == "bfloat16"
        assert np.array_equal(view.numpy().view(ml_dtypes.bfloat16), source)


def test_tensors_with_lazy_conjugation_and_gradients(ends: Ends) -> None:
    source = torch.randn(3, 4, dtype=torch.complex64)
    lazy = source.conj().T
    with ends.reader.view(ends.send(lazy)) as view:
        assert torch.equal(view.torch(), lazy.resolve_conj())
    with ends.reader.view(ends.send(lazy.imag)) as view:
        assert torch.equal(view.torch(), lazy.imag)
    with ends.reader.view(ends.send(torch.nn.Parameter(torch.ones(3)))) as view:
        assert not view.torch().requires_grad


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([1, 2], TypeError, "list is neither a numpy array nor a torch tensor"),
        (np.array(["a"]), TypeError, "dtype str32 cannot be sent; these can: bool, uint8"),
        (np.array([None]), TypeError, "dtype object cannot be sent"),
        (np.zeros(2, np.longdouble), TypeError, "dtype float128 cannot be sent"),
        (np.zeros((1,) * 9), ValueError, "9 dimensions; at most 8"),
        (torch.zeros(2, device="meta"), ValueError, "on meta cannot be sent"),
        (torch.zeros(2, 2).to_sparse(), ValueError, "sparse_coo tensor on cpu cannot be sent"),
        (torch.zeros(2, dtype=torch.bits8), TypeError, "dtype bits8 cannot be sent"),
        (np.zeros(SLOT + 1, np.uint8), MessageTooLargeError, f"{SLOT + 1} bytes exceeds"),
    ],
)
def test_sources_that_cannot_be_sent_are_refused_and_take_no_slot(
    ends: Ends, source: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ends.writer.try_put(source)
    assert ends.slots.num_free == 3


def test_a_writer_needs_no_torch_for_arrays() -> None:
    code = (
        "import sys, numpy; from shmllm.ipc.tensors import TensorRef, TensorWriter, TensorReader;"
        "from shmllm.ipc.slots import SlotReader, SlotWriter;"
        "from shmllm.ipc.layout import SlotClass, SlotLayout;"
        "layout = SlotLayout(0, (SlotClass(4096, 1, 4096, 4096, True),));"
        "memory = memoryview(bytearray(8192));"
        "slots = SlotWriter(memory, layout, lambda *_: None, lambda *_: None);"
        "ref = TensorWriter(slots).try_put(numpy.arange(3.0));"
        "print(TensorReader(SlotReader(memory, layout)).view(ref).numpy().sum());"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=50
    )
    assert (done.stdout, done.returncode) == ("3.0\n", 0), done.stderr


def test_arrays_cannot_be_written_to(ends: Ends) -> None:
    with ends.reader.view(ends.send(np.arange(3))) as view:
        array = view.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        del array


def test_a_released_view_releases_the_slot_and_refuses_new_arrays(ends: Ends) -> None:
    view = ends.reader.view(ends.send(np.arange(3)))
    assert ends.slots.num_free == 2
    assert view.release()
    assert view.release()
    assert ends.slots.num_free == 3
    for use in (view.numpy, view.torch):
        with pytest.raises(ValueError, match="was released"):
            use()
    assert (view.shape, view.dtype, view.nbytes) == ((3,), "int64", 24)


def test_arrays_keep_the_slot_after_the_release_until_the_last_one_ends(ends: Ends) -> None:
    view = ends.reader.view(ends.send(np.arange(10)))
    kept = [
        view.numpy()[3:],
        view.numpy().reshape(2, 5).T.view(np.uint64),
        memoryview(view.numpy()),
        view.torch()[3:].reshape(-1),
        np.from_dlpack(view.torch()),
    ]
    assert not view.release()
    assert kept[0][0] == 3
    while kept:
        assert ends.slots.num_free == 2
        assert ends.reader.num_held == 1
        del kept[0]
    assert ends.slots.num_free == 3
    assert view.release()


def test_kept_arrays_do_not_change_when_the_writer_continues(ends: Ends) -> None:
    with ends.reader.view(ends.send(np.full(5, 7))) as view:
        kept = view.numpy()
    for value in range(10):
        with ends.reader.view(ends.send(np.full(5, value))) as view:
            assert view.ref.slot.slot != 0
    assert kept.tolist() == [7] * 5
    del kept


def test_a_garbage_collected_view_releases_the_slot(ends: Ends) -> None:
    ends.reader.view(ends.send(np.arange(3)))
    assert ends.slots.num_free == 3
    view = ends.reader.view(ends.send(np.arange(3)))
    cycle = [view]
    cycle.append(cycle)  # type: ignore[arg-type]
    del view, cycle
    assert ends.slots.num_free == 2
    gc.collect()
    assert ends.slots.num_free == 3


def test_a_reference_is_viewed_once_at_a_time(ends: Ends) -> None:
    ref = ends.send(np.arange(3))
    view = ends.reader.view(ref)
    with pytest.raises(ProtocolMismatchError, match="a view holds already"):
        ends.reader.view(ref)
    view.release()
    with pytest.raises(ProtocolMismatchError, match="not published"):
        ends.reader.view(ref)


def test_views_outlive_the_slots(ends: Ends) -> None:
    view = ends.reader.view(ends.send(np.arange(3)))
    array = view.numpy()
    ends.slots_read.close()
    assert array.tolist() == [0, 1, 2]
    del array
    assert view.release()
    assert ends.reader.num_held == 0
    ends.slots_read = SlotReader(ends.slots._memory, LAYOUT)


def test_arrays_outlive_the_segment(ends: Ends) -> None:
    segment = Segment.create(SegmentKind.CLIENT)
    place = layout.REQUEST_SLOT_LAYOUT
    slots = SlotWriter(segment.buffer, place, segment.allocate, segment.discard)
    slots_read = SlotReader(segment.buffer, place)
    ref = TensorWriter(slots).try_put(np.arange(1000))
    assert ref is not None
    view = TensorReader(slots_read).view(ref)
    array, tensor = view.numpy()[990:], view.torch()[995:]
    slots.close()
    slots_read.close()
    segment.close()
    assert array.tolist() == list(range(990, 1000))
    assert tensor.tolist() == list(range(995, 1000))


def test_a_forked_child_releases_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    view = ends.reader.view(ends.send(np.arange(3)))
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        view.release()
    assert ends.slots.num_free == 2


def test_while_the_reader_holds_all_slots_try_put_returns_none_and_put_times_out(
    ends: Ends,
) -> None:
    views = [ends.reader.view(ends.send(np.arange(3))) for _ in range(3)]
    assert ends.writer.try_put(np.arange(3)) is None
    calls = []
    with pytest.raises(IpcTimeoutError, match="24 bytes in time: the reader holds all 3"):
        ends.writer.put(
            np.arange(3),
            deadline=time.monotonic() + 0.01,
            on_full=lambda: calls.append(len(views)),
        )
    assert len(calls) >= 2


def test_put_continues_when_a_slot_is_released(ends: Ends) -> None:
    views = [ends.reader.view(ends.send(np.arange(3))) for _ in range(3)]
    ref = ends.writer.put(np.arange(3), deadline=None, on_full=lambda: views[1].release())
    assert ref.slot.slot == 1
    ends.reader.view(ref)
    views.clear()


def test_an_error_of_on_full_ends_put(ends: Ends) -> None:
    views = [ends.reader.view(ends.send(np.arange(3))) for _ in range(3)]

    def on_full() -> None:
        raise LookupError("the engine is dead")

    with pytest.raises(LookupError):
        ends.writer.put(np.arange(3), deadline=None, on_full=on_full)
    views.clear()


def test_a_copy_that_fails_leaves_no_slot_claimed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "copyto", fail)
    with pytest.raises(MemoryError):
        ends.writer.try_put(np.arange(3))
    assert ends.slots.num_free == 3


def test_no_space_is_passed_on() -> None:
    def refuse(offset: int, nbytes: int) -> None:
        raise NoSpaceError("full")

    slots = SlotWriter(memoryview(bytearray(4096 + 3 * SLOT)), LAYOUT, refuse, refuse)
    with pytest.raises(NoSpaceError):
        TensorWriter(slots).try_put(np.arange(3))
    assert slots.num_free == 3


def test_views_may_end_in_another_thread(ends: Ends) -> None:
    for _ in range(50):
        views = [ends.reader.view(ends.send(np.arange(3)))]
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
        assert ends.slots.num_free == 3


def test_an_encoded_reference_has_a_fixed_form() -> None:
    ref = TensorRef(SlotRef(25, 64, 48), "bfloat16", (2, 3, 4))
    encoded = ref.encode()
    assert len(encoded) == REF_BYTES == 88
    assert encoded[:24] == struct.pack("<IHBBQQ", 25, 33, 3, 0, 64, 48)
    assert TensorRef.decode(memoryview(encoded)) == ref


def test_dtype_codes_never_change() -> None:
    assert {name: dtype.code for name, dtype in DTYPES.items()} == {
        "bool": 1,
        "uint8": 2,
        "int8": 3,
        "uint16": 4,
        "int16": 5,
        "uint32": 6,
        "int32": 7,
        "uint64": 8,
        "int64": 9,
        "float16": 10,
        "float32": 11,
        "float64": 12,
        "complex64": 13,
        "complex128": 14,
        "bfloat16": 33,
        "complex32": 34,
        "float8_e4m3fn": 35,
        "float8_e5m2": 36,
        "float8_e4m3fnuz": 37,
        "float8_e5m2fnuz": 38,
        "float8_e8m0fnu": 39,
        "float4_e2m1fn_x2": 40,
    }
    for name, dtype in DTYPES.items():
        assert dtype.numpy.itemsize == TORCH_DTYPES[name].itemsize


def encode(
    index: int = 0,
    code: int = 7,
    num_dimensions: int = 1,
    offset: int = 0,
    nbytes: int = 8,
    shape: tuple[int, ...] = (2,),
) -> bytes:
    dimensions = (*shape, *[0] * (MAX_DIMENSIONS - len(shape)))
    return struct.pack("<IHBxQQ8Q", index, code, num_dimensions, offset, nbytes, *dimensions)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        encode()[:-1],
        encode() + b"\0",
        encode(code=0),
        encode(code=15),
        encode(code=65535),
        encode(num_dimensions=9),
        encode(num_dimensions=0),
        encode(nbytes=7),
        encode(nbytes=0),
        encode(shape=(3,)),
        encode(offset=4),
        encode(nbytes=0, num_dimensions=3, shape=(0, 2**63, 2)),
        encode(nbytes=0, num_dimensions=2, shape=(2**63, 2)),
        encode(nbytes=2**63, shape=(2**61,)),
    ],
)
def test_bytes_that_are_no_reference_are_refused(record: bytes) -> None:
    with pytest.raises(ProtocolMismatchError):
        TensorRef.decode(record)


@pytest.mark.parametrize(
    "record",
    [
        encode(index=1),
        encode(index=2**32 - 1),
        encode(shape=(3,), nbytes=12),
        encode(offset=64),
        encode(offset=2**64 - 64),
        encode(nbytes=2**62, shape=(2**60,)),
    ],
)
def test_references_outside_of_the_published_bytes_are_refused(ends: Ends, record: bytes) -> None:
    kept = ends.send(np.zeros(2, np.int32))
    with pytest.raises(ProtocolMismatchError):
        ends.reader.view(TensorRef.decode(record))
    ends.reader.view(kept)


ANY = st.one_of(
    st.binary(max_size=2 * REF_BYTES),
    st.binary(min_size=REF_BYTES, max_size=REF_BYTES),
    st.builds(
        encode,
        index=st.integers(0, 4),
        code=st.sampled_from([0, *(dtype.code for dtype in DTYPES.values())]),
        num_dimensions=st.integers(0, 9),
        offset=st.sampled_from([0, 0, 0, 1, 64, 4096, 2**64 - 64]),
        nbytes=st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1)),
        shape=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**64 - 1)), max_size=8).map(
            tuple
        ),
    ),
)


@settings(deadline=None)
@given(record=ANY)
def test_arbitrary_bytes_are_a_published_tensor_or_an_error(record: bytes) -> None:
    ends = Ends()
    for number in range(3):
        ends.send(np.full(100, number, np.uint8))
    try:
        view = ends.reader.view(TensorRef.decode(record))
    except ProtocolMismatchError:
        return
    begin = view.ref.slot.offset
    assert begin + view.nbytes <= 100
    assert view.numpy().tobytes() == bytes([view.ref.slot.slot]) * view.nbytes
    assert view.torch().shape == view.shape


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=MAX_DIMENSIONS).map(tuple),
)
def test_decode_returns_the_encoded_reference(name: str, shape: tuple[int, ...]) -> None:
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[name].numpy.itemsize
    ref = TensorRef(SlotRef(3, 128, nbytes), name, shape)
    assert TensorRef.decode(ref.encode()) == ref


def test_every_dtype_of_torch_with_whole_elements_in_memory_is_covered() -> None:
    every = {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    }
    missing = {name for name in every - DTYPES.keys() if not name.startswith(("q", "bits"))}
    assert {name.rstrip("1234567") for name in missing} <= {"int", "uint"}


def test_slots_are_aligned_for_every_dtype() -> None:
    for slots in (layout.REQUEST_SLOT_LAYOUT, layout.OUTPUT_SLOT_LAYOUT):
        assert all(each.data_offset % layout.PAGE_BYTES == 0 for each in slots.classes)
