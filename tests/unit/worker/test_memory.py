"""The size of the KV cache, and the error messages where memory is short."""

from __future__ import annotations

import pytest
from support.cache_shapes import one_group

from shmllm.core.kv_groups import FullAttention, RecurrentState, group_layers, most_states
from shmllm.errors import EngineStartError
from shmllm.worker.memory import CacheShape, CacheSize, check_weights_fit, fit_kv_cache, smallest

MIB = 2**20


class Pool:
    """A memory pool of which 100 MiB are free."""

    kind = "memory"

    def free_bytes(self):
        return 100 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "max_model_len"),
    [(8_000, 112), (8_999, 112), (7_999, 96), (2_000, 16)],
)
def test_max_model_len_fits_beside_the_padding_block(num_bytes, max_model_len):
    size = fit_kv_cache(num_bytes, one_group(1000), 112)
    assert size.max_model_len == max_model_len
    assert (size.num_blocks - 1) * 16 >= size.max_model_len
    assert (size.warning is None) == (max_model_len == 112)


def test_the_warning_of_a_shorter_limit_has_both_lengths_and_the_remedy():
    size = fit_kv_cache(5 * MIB, one_group(MIB), 2000)
    assert size.max_model_len == 64
    assert "64 instead of 2,000" in size.warning
    assert "5 MiB" in size.warning
    needed = size.warning.split("kv_cache_memory_bytes to ")[1].split(" for all")[0]
    cured = fit_kv_cache(int(needed.replace(",", "")), one_group(MIB), 2000)
    assert cured.warning is None
    less = fit_kv_cache(int(needed.replace(",", "")) - 1, one_group(MIB), 2000)
    assert less.max_model_len < 2000


@pytest.mark.parametrize("num_bytes", [1, 999, 1_999])
def test_no_room_for_one_block_is_an_error_with_both_numbers(num_bytes):
    with pytest.raises(EngineStartError, match=f"is {num_bytes:,} and .* needs 2,000"):
        fit_kv_cache(num_bytes, one_group(1000), 64)


def test_weights_that_fit_pass():
    check_weights_fit(100 * MIB, "float32", Pool())


@pytest.mark.parametrize(
    ("dtype", "advises"),
    [("float32", "'bfloat16' needs half"), ("bfloat16", "'int4' needs less"), ("int4", "")],
)
def test_weights_that_do_not_fit_are_an_error_with_both_numbers(dtype, advises):
    with pytest.raises(EngineStartError, match=f"need 3,000 MiB in {dtype} and 100 MiB") as error:
        check_weights_fit(3000 * MIB, dtype, Pool())
    assert advises in str(error.value)
    assert bool(advises) == ("; " in str(error.value))


STATE, LAYER = 1000, 10


def with_states(interval: int = 64, rows: int = 4) -> CacheShape:
    """Three layers with states and one with attention, in chunks of 64 tokens."""
    rules = [*[(RecurrentState(interval),)] * 3, (FullAttention(),)]
    return CacheShape(group_layers(rules), 16, LAYER, 64, 2 * rows, STATE)


@pytest.mark.parametrize("num_bytes", [30_000, 100_000, 10_000_000])
def test_states_take_no_more_than_is_given(num_bytes: int) -> None:
    shape = with_states()
    size = fit_kv_cache(num_bytes, shape, 100_000)
    assert size.num_bytes == size.num_blocks * LAYER + size.num_states * 3 * STATE
    assert size.num_bytes <= num_bytes < shape.bytes_for(size.num_blocks + 1)
    assert size.num_states > most_states(shape.groups, size.max_model_len, 64)


def test_there_are_states_for_the_requests_and_the_tokens_that_fit() -> None:
    shape = with_states(interval=16, rows=2)
    assert shape.states_for(100_000) == 1 + 100_000 * LAYER // (3 * STATE)
    many = CacheShape(shape.groups, 16, 100 * STATE, 64, 2 * 2, STATE)
    assert many.states_for(1000) == 1 + 2 * 2 + 1000
    assert many.states_for(2) == 1 + 2 * 2 + 2
    assert one_group(1000).states_for(1000) == 1


def only_states() -> CacheShape:
    """Three layers with states and none with attention."""
    return CacheShape(group_layers([(RecurrentState(64),)] * 3), 16, 0, 64, 8, STATE)


@pytest.mark.parametrize("count", [4, 5, 40])
def test_without_attention_the_cache_has_states_alone(count: int) -> None:
    shape, given = only_states(), count * 3 * STATE
    for num_bytes in (given, given + 3 * STATE - 1):
        size = fit_kv_cache(num_bytes, shape, 100_000)
        assert (size.num_blocks, size.num_states, size.num_bytes) == (1, count, given)
        assert (size.max_model_len, size.warning) == (100_000, None)


def test_without_attention_a_request_holds_no_more_states_than_there_are() -> None:
    shape = only_states()
    most = shape.blocks_for(100_000)
    assert most == most_states(shape.groups, 100_000, 64) == 3
    size = fit_kv_cache(most * 3 * STATE, shape, 100_000)
    assert size.max_model_len == 128
    assert size.warning is not None
    assert shape.bytes_for(10) == 10 * 3 * STATE  # num_gpu_blocks_override
    with pytest.raises(EngineStartError, match=r"2 blocks of states, needs"):
        fit_kv_cache(2 * 3 * STATE - 1, shape, 64)


def test_without_room_for_a_state_the_error_has_the_size() -> None:
    fewest = with_states().bytes_for(2)
    with pytest.raises(EngineStartError, match=f"needs {fewest:,}"):
        fit_kv_cache(fewest - 1, with_states(), 64)
    assert fit_kv_cache(fewest, with_states(), 64).max_model_len == 16


def test_the_smallest_cache_has_the_fewest_blocks_and_then_the_fewest_states() -> None:
    """A stage's blocks may be larger than another's."""
    most = CacheSize(9, 1, 100, 64, None)
    fewer_blocks, fewest_states = CacheSize(7, 3, 500, 64, None), CacheSize(7, 2, 500, 64, None)
    assert smallest([most, fewer_blocks, fewest_states]) is fewest_states
