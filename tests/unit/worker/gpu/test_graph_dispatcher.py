"""The captured graphs and the choice for each step equal the table in vLLM's documentation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmllm.config.engine import EngineConfig, SchedulerConfig
from shmllm.config.graphs import CudaGraphMode, GraphConfig
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.worker.gpu.graph_dispatcher import (
    BatchDescriptor,
    DraftDispatcher,
    GraphDispatcher,
    default_sizes,
)

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
# From vLLM's design document on CUDA graphs: for each mode, that of decodes and of other steps.
DOCUMENTED = {
    "NONE": (NONE, NONE),
    "PIECEWISE": (PIECEWISE, PIECEWISE),
    "FULL": (FULL, FULL),
    "FULL_DECODE_ONLY": (FULL, NONE),
    "FULL_AND_PIECEWISE": (FULL, PIECEWISE),
}
modes = st.sampled_from(list(CudaGraphMode))
limits = st.tuples(st.integers(1, 300), st.integers(1, 1200))
size_lists = st.none() | st.lists(st.integers(1, 300), min_size=1, max_size=12)


@st.composite
def dispatchers(draw):
    """Draw a dispatcher and its (max_num_seqs, max_num_tokens, max_drafts, max_verified)."""
    seqs, tokens = draw(limits)
    drafts = draw(st.integers(0, tokens - 1))
    sizes = draw(size_lists)
    if sizes is not None:
        sizes = [*sizes, 1]
    most = draw(st.sampled_from([0, 5]))
    made = GraphDispatcher(draw(modes), sizes, seqs, tokens, max_drafts=drafts, max_verified=most)
    return made, seqs, tokens, drafts, most


@st.composite
def steps(draw):
    """Draw a dispatcher, a step within its limits, and the dispatcher's max_verified."""
    dispatcher, max_num_seqs, max_num_tokens, max_drafts, max_verified = draw(dispatchers())
    num_reqs = draw(st.integers(1, min(max_num_seqs, max_num_tokens)))
    uniform = draw(st.booleans())
    num_drafts = 0
    if not uniform:
        num_drafts = draw(st.integers(0, min(max_drafts, max_num_tokens - num_reqs)))
    known = num_reqs + num_drafts
    is_exact = uniform or draw(st.booleans())
    num_tokens = known if is_exact else draw(st.integers(known, max_num_tokens))
    return dispatcher, num_tokens, num_reqs, uniform, num_drafts, max_verified


def test_the_modes_equal_those_of_vllm() -> None:
    assert {mode.name: (mode.decode_mode, mode.mixed_mode) for mode in CudaGraphMode} == DOCUMENTED


@pytest.mark.parametrize("name", ["FULL_AND_PIECEWISE", "full_and_piecewise"])
def test_a_mode_is_found_by_its_name(name: str) -> None:
    assert CudaGraphMode.parse(name) is CudaGraphMode.FULL_AND_PIECEWISE


def test_the_error_of_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(EngineStartError, match="'SOME' is not one of NONE, PIECEWISE, FULL"):
        CudaGraphMode.parse("SOME")


def test_default_sizes_of_decodes() -> None:
    decodes, _ = default_sizes(PIECEWISE, 320, 8192)
    assert decodes[:6] == [1, 2, 4, 8, 16, 24]
    assert decodes[-5:] == [256, 272, 288, 304, 320]
    assert {b - a for a, b in pairwise(decodes[3:])} == {8, 16}
    assert len(decodes) == 4 + 31 + 4


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_tokens", "expected"),
    [
        (1, 8192, [1]),
        (3, 8192, [1, 2, 3]),
        (100, 8192, [88, 96, 100]),
        (260, 8192, [248, 256, 260]),
        (256, 20, [8, 16, 20]),
    ],
)
def test_default_sizes_of_decodes_end_with_the_largest_number_of_decodes(
    max_num_seqs: int, max_num_tokens: int, expected: list[int]
) -> None:
    decodes, _ = default_sizes(PIECEWISE, max_num_seqs, max_num_tokens)
    assert decodes[-3:] == expected


@pytest.mark.parametrize(
    ("max_num_tokens", "expected"),
    [
        (8192, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (512, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        (100, [1, 2, 4, 8, 16, 32, 64, 100]),
        (1, [1]),
    ],
)
def test_default_sizes_of_piecewise_graphs_are_about_ten(
    max_num_tokens: int, expected: list[int]
) -> None:
    assert default_sizes(PIECEWISE, 256, max_num_tokens)[1] == expected


@pytest.mark.parametrize(
    ("largest", "decodes", "mixed"),
    [(20, [1, 2, 4, 8, 16, 20], [1, 2, 4, 8, 16, 20]), (1, [1], [1])],
)
def test_a_maximum_bounds_the_default_sizes(
    largest: int, decodes: list[int], mixed: list[int]
) -> None:
    assert default_sizes(PIECEWISE, 256, 8192, largest) == (decodes, mixed)


def test_a_maximum_may_be_larger_than_the_default_one() -> None:
    dispatcher = GraphDispatcher(CudaGraphMode.FULL_AND_PIECEWISE, None, 64, 8192, 2048)
    by_mode = {
        wanted: [
            descriptor.num_tokens for mode, descriptor in dispatcher.captures() if mode is wanted
        ]
        for wanted in (FULL, PIECEWISE)
    }
    assert by_mode[PIECEWISE][:3] == [2048, 1024, 512]
    assert by_mode[FULL][0] == 64


def test_full_graphs_of_mixed_steps_have_the_sizes_of_both() -> None:
    decodes, mixed = default_sizes(FULL, 40, 8192)
    assert set(mixed) == {*decodes, 64, 128, 256, 512}


@pytest.mark.parametrize("mode", list(CudaGraphMode))
def test_captures_by_mode(mode: CudaGraphMode) -> None:
    captures = GraphDispatcher(mode, [8, 2, 8, 4000, 1], 4, 64).captures()
    found = {
        (chosen.name, d.uniform): [(d.num_tokens, d.num_reqs) for m, d in captures if m is chosen]
        for chosen, d in captures
    }
    mixed, decodes = [(8, 4), (2, 2), (1, 1)], [(2, 2), (1, 1)]
    expected = {
        "NONE": {},
        "PIECEWISE": {("PIECEWISE", False): mixed},
        "FULL": {("FULL", False): mixed},
        "FULL_DECODE_ONLY": {("FULL", True): decodes},
        "FULL_AND_PIECEWISE": {("PIECEWISE", False): mixed, ("FULL", True): decodes},
    }
    assert found == expected[mode.name]


@pytest.mark.parametrize("mode", list(CudaGraphMode))
def test_captures_of_steps_that_verify_drafts(mode: CudaGraphMode) -> None:
    """They are further graphs, unless one graph serves every step of its size."""
    sizes = [1, 2, 8, 16]
    made = GraphDispatcher(mode, sizes, 4, 64, max_drafts=6, max_verified=3)
    without = set(GraphDispatcher(mode, sizes, 4, 64).captures())
    most = 0 if mode is CudaGraphMode.FULL else 3
    verifying = [BatchDescriptor(8, 4, False, 4, most), BatchDescriptor(2, 2, False, 0, most)]
    found = {d for m, d in made.captures() if m is FULL and not d.uniform}
    if mode is CudaGraphMode.FULL:
        largest = BatchDescriptor(16, 4, False, 6)
        assert found == {largest, *verifying, BatchDescriptor(1, 1, False)}
        assert len(made.captures()) == len(without)
    elif mode.decode_mode is FULL:
        assert found == set(verifying)
        assert made.dispatch(7, 3, False, 4) == (FULL, verifying[0])
        assert made.dispatch(7, 3, False, 3)[0] is mode.mixed_mode
    else:
        assert not found


@given(dispatchers())
def test_each_size_is_captured_once_and_the_largest_first(made) -> None:
    dispatcher, max_num_seqs, max_num_tokens, max_drafts, _ = made
    captures = dispatcher.captures()
    sizes = [descriptor.num_tokens for _, descriptor in captures]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(captures)) == len(captures)
    for mode, descriptor in captures:
        assert mode in (PIECEWISE, FULL)
        assert 1 <= descriptor.num_reqs <= max_num_seqs
        assert descriptor.num_reqs <= descriptor.num_tokens <= max_num_tokens
        assert not descriptor.uniform or descriptor.num_reqs == descriptor.num_tokens
        assert 0 <= descriptor.num_drafts <= max_drafts
        assert descriptor.num_samples <= descriptor.num_tokens


@given(steps())
def test_a_step_gets_the_best_mode_and_the_smallest_size(step) -> None:
    dispatcher, num_tokens, num_reqs, uniform, num_drafts, max_verified = step
    verifies = not uniform and num_tokens == num_reqs + num_drafts
    most = max_verified if verifies else 0
    exact = BatchDescriptor(num_tokens, num_reqs, uniform, num_drafts, most)
    for_all = dispatcher.mode.mixed_mode

    def serves(mode: CudaGraphMode, descriptor: BatchDescriptor) -> bool:
        return (uniform if descriptor.uniform else mode is for_all or verifies) and (
            descriptor.num_tokens >= num_tokens
        )

    # The reference tries all captured graphs.
    fitting = [capture for capture in dispatcher.captures() if serves(*capture)]
    expected = (NONE, exact)
    for wanted in (PIECEWISE, FULL):
        of_mode = [descriptor for mode, descriptor in fitting if mode is wanted]
        if of_mode:
            smallest = min(of_mode, key=lambda descriptor: descriptor.num_tokens)
            if wanted is PIECEWISE:
                smallest = BatchDescriptor(smallest.num_tokens, num_reqs, uniform, num_drafts)
            expected = (wanted, smallest)
    found = dispatcher.dispatch(num_tokens, num_reqs, uniform, num_drafts)
    assert found == expected
    assert found[1].num_tokens >= num_tokens
    assert found[1].num_reqs >= num_reqs
    assert found[1].num_samples >= num_reqs + num_drafts


@given(steps())
def test_full_only_where_the_mode_allows_it(step) -> None:
    dispatcher, num_tokens, num_reqs, uniform, num_drafts, _ = step
    mode, descriptor = dispatcher.dispatch(num_tokens, num_reqs, uniform, num_drafts)
    allowed = {dispatcher.mode.mixed_mode, NONE}
    if uniform or num_tokens == num_reqs + num_drafts:
        allowed.add(dispatcher.mode.decode_mode)
    assert mode in allowed
    if mode is FULL:
        assert (mode, descriptor) in dispatcher.captures()


@pytest.mark.parametrize("mode", list(CudaGraphMode))
def test_every_step_of_a_small_engine(mode: CudaGraphMode) -> None:
    dispatcher = GraphDispatcher(mode, None, 20, 40)
    decode, mixed = DOCUMENTED[mode.name]
    for num_tokens in range(1, 41):
        for num_reqs in range(1, min(num_tokens, 20) + 1):
            assert dispatcher.dispatch(num_tokens, num_reqs, uniform=False)[0] is mixed
            if num_reqs == num_tokens:
                assert dispatcher.dispatch(num_tokens, num_reqs, uniform=True)[0] is decode


def test_a_step_larger_than_every_graph_runs_without_padding() -> None:
    dispatcher = GraphDispatcher(CudaGraphMode.FULL_AND_PIECEWISE, [1, 8], 256, 8192)
    assert dispatcher.dispatch(9, 9, uniform=True) == (NONE, BatchDescriptor(9, 9, True))
    assert dispatcher.dispatch(600, 2, uniform=False) == (NONE, BatchDescriptor(600, 2, False))


def test_a_full_graph_pads_the_requests_and_a_piecewise_graph_does_not() -> None:
    for mode, num_reqs in ((FULL, 16), (PIECEWISE, 9)):
        found = GraphDispatcher(mode, None, 256, 8192).dispatch(9, 9, uniform=True)
        assert found == (mode, BatchDescriptor(16, num_reqs, mode is PIECEWISE))


@pytest.mark.parametrize(
    ("mode", "size"), [("PIECEWISE", 65), ("FULL", 65), ("FULL_DECODE_ONLY", 9)]
)
def test_there_are_no_graphs_of_sizes_that_no_step_can_have(mode: str, size: int) -> None:
    dispatcher = GraphDispatcher(CudaGraphMode[mode], [size], 8, 64)
    assert dispatcher.captures() == []
    assert dispatcher.dispatch(8, 8, uniform=True) == (NONE, BatchDescriptor(8, 8, True))


def drafting(mode: str, *sizes: int, max_verified: int = 0) -> DraftDispatcher:
    config = EngineConfig(
        LoadConfig("a model"), scheduler=SchedulerConfig(4, 64), graphs=GraphConfig(mode, sizes)
    )
    return DraftDispatcher(config, 4, 3, max_verified)


def test_only_graphs_compute_logits_of_further_tokens() -> None:
    assert drafting("FULL_AND_PIECEWISE", 7).dispatch(6, 4, 3) == (
        FULL,
        BatchDescriptor(7, 4, False, 3),
    )
    assert drafting("NONE", 7).dispatch(6, 4, 3) == (NONE, BatchDescriptor(6, 4, False))


def test_a_graph_serves_no_request_with_more_tokens_than_its_launches() -> None:
    made = drafting("FULL_AND_PIECEWISE", 7, max_verified=2)
    assert made.dispatch(6, 4, 2) == (FULL, BatchDescriptor(7, 4, False, 3, 2))
    assert made.dispatch(6, 4, 3) == (NONE, BatchDescriptor(6, 4, False))


def test_there_are_no_graphs_where_the_model_has_none_of_its_decodes() -> None:
    assert drafting("PIECEWISE", 2, 4).graphs.captures() == []
    assert drafting("FULL_AND_PIECEWISE", 2, 4).dispatch(4, 4, 1) == (
        FULL,
        BatchDescriptor(4, 4, True),
    )


def test_a_step_larger_than_every_graph_has_none() -> None:
    assert drafting("FULL", 40).dispatch(2, 2, 1) == (NONE, BatchDescriptor(2, 2, True))
    assert drafting("FULL", 4, 8).dispatch(9, 2, 8) == (NONE, BatchDescriptor(9, 2, False))
