"""Dispatcher, ring and slots: an exception of a signal handler at every line."""

from __future__ import annotations

import ast
import dis
import itertools
import sys
import types
from pathlib import Path

import pytest
from support.fakes import FakeEngineClient
from support.interrupting import Interrupted, Moment, raising_handler
from support.variants import diagonal

from shmllm.frontend import dispatcher, front_end, streaming
from shmllm.frontend.dispatcher import Dispatcher
from shmllm.frontend.input_processor import PreparedRequest
from shmllm.frontend.output_processor import OutputProcessor
from shmllm.frontend.request_group import RequestGroup
from shmllm.ipc import layout
from shmllm.ipc.ring import RingWriter
from shmllm.ipc.ring_reader import RingReader
from shmllm.ipc.segment import Segment
from shmllm.ipc.slots import SlotReader, SlotWriter
from shmllm.ipc.states import SegmentKind
from shmllm.params.request import EngineCoreRequest
from shmllm.params.sampling import SamplingParams

FRONT_END = ("shmllm/frontend/", "/threading.py")


def request(max_tokens):
    params = SamplingParams(max_tokens=max_tokens)
    return PreparedRequest(None, params, EngineCoreRequest(-1, [5], params))


def run(dispatcher, group):
    while group.num_open:
        dispatcher.collect(group, 1.0)


def interrupt_everywhere(make, call, check, is_twice=False):
    """Interrupt a call at each of its lines, on a fresh object each time."""
    for number in itertools.count(1):
        with raising_handler(is_twice):
            made = make()
            moment = Moment(number, call.modules)
            try:
                moment.call(lambda made=made: call(made))
                for _ in range(2):  # the second signal may have arrived at the last point
                    pass
            except Interrupted:
                pass
            try:
                check(made)
            except BaseException as error:
                raise AssertionError(f"point {number}: {moment.where}") from error
            if moment.where is None:
                return number


@pytest.mark.parametrize(("is_beside_others", "is_twice"), diagonal([False, True], [False, True]))
def test_the_dispatcher_is_free_after_an_interrupt_at_any_line(
    tokenizer_of, is_beside_others, is_twice
):
    class Parts:
        def __init__(self):
            self.engine = FakeEngineClient(1)
            self.dispatcher = Dispatcher(self.engine, OutputProcessor(tokenizer_of("byte_level")))
            self.other = RequestGroup()
            self.states = []
            if is_beside_others:
                self.states = self.dispatcher.submit(self.other, request(6), 0)

    def call(parts):
        group = RequestGroup()
        try:
            for index in range(2):
                parts.dispatcher.submit(group, request(2), index)
            run(parts.dispatcher, group)
            parts.dispatcher.call(1)
        finally:
            parts.dispatcher.discard_group(group)

    call.modules = FRONT_END

    def check(parts):
        dispatcher = parts.dispatcher
        run(dispatcher, parts.other)
        group = RequestGroup()
        (state,) = dispatcher.submit(group, request(3), 0)
        run(dispatcher, group)
        assert state.token_ids == [7] * 3
        assert [state.token_ids for state in parts.states] == [[7] * 6] * len(parts.states)
        assert not dispatcher._lock.locked()
        assert (dispatcher._poller, dispatcher._senders, dispatcher._groups) == (None, [], {})
        if not is_twice:  # the second signal may prevent that a state is dropped
            assert dispatcher.outputs._states == {}
        assert parts.engine.left == {}

    assert interrupt_everywhere(Parts, call, check, is_twice) > 100


def protected_lines(source):
    """The lines inside the statements `try` and `with`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try | ast.With):
            yield from range(node.body[0].lineno, node.body[-1].end_lineno + 1)


def uncovered_jumps(code, lines):
    """(function, line) of each jump back on one of the lines that no handler covers."""
    covered = [range(each.start, each.end) for each in dis.Bytecode(code).exception_entries]
    for instruction in dis.get_instructions(code) if "<genexpr>" not in code.co_name else ():
        if (
            instruction.opname == "JUMP_BACKWARD"
            and instruction.positions.lineno in lines
            and not any(instruction.offset in each for each in covered)
        ):
            yield code.co_qualname, instruction.positions.lineno
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from uncovered_jumps(constant, lines)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 covers all jumps")
@pytest.mark.parametrize("module", [dispatcher, front_end, streaming], ids=lambda m: m.__name__)
def test_no_handler_of_a_signal_can_raise_between_a_loop_and_the_try_around_it(module):
    """At such a jump, CPython may run a handler whose exception then skips the `finally`."""
    source = Path(module.__file__).read_text()
    found = uncovered_jumps(compile(source, "", "exec"), {*protected_lines(source)})
    assert not [*found]


def test_each_record_is_received_once_after_an_interrupt_at_any_line():
    segments = []

    class Ends:
        def __init__(self):
            self.segment = Segment.create(SegmentKind.CLIENT)
            segments.append(self.segment)
            memory = self.segment.buffer
            self.writer = RingWriter.over(memory, layout.OUTPUT_RING_LAYOUT)
            self.reader = RingReader.over(memory, layout.OUTPUT_RING_LAYOUT)
            self.slots = SlotWriter(
                memory, layout.OUTPUT_SLOT_LAYOUT, self.segment.allocate, self.segment.discard
            )
            self.read_slots = SlotReader(memory, layout.OUTPUT_SLOT_LAYOUT)
            self.inbox = []
            self.ref = None
            for number in range(3):
                self.writer.try_write(number, b"text")
            slot = self.slots.claim(100)
            self.ref = slot.publish()

        def decode(self, kind, view):
            message = kind, bytes(view)
            return message, self.inbox.append, self.ref if kind == 1 else None

        def receive(self):
            self.reader.receive(self.decode, self.read_slots.release)

        def close(self):
            for part in (self.writer, self.reader, self.slots, self.read_slots, self.segment):
                part.close()

    def call(ends):
        ends.receive()

    call.modules = ("shmllm/ipc/",)

    def check(ends):
        ends.receive()
        assert ends.inbox == [(number, b"text") for number in range(3)]
        assert ends.slots.num_free == ends.slots.num_slots
        ends.receive()
        ends.reader.check_integrity()
        assert ends.writer.free_bytes == layout.RING_BYTES
        ends.close()

    try:
        assert interrupt_everywhere(Ends, call, check) > 30
    finally:
        for segment in segments:
            segment.close()
