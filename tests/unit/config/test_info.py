"""EngineInfo: what follows from the sizes of an engine's pools."""

from __future__ import annotations

import pytest
from support.fakes import info

from shmllm.config.info import EngineInfo

NO_ATTENTION = {"num_blocks": 0, "max_blocks_per_request": 0}


@pytest.mark.parametrize(
    ("sizes", "requests", "counted"),
    [
        ({"num_blocks": 40, "max_blocks_per_request": 16}, 2.5, 40),
        ({"num_states": 9, "max_states_per_request": 3, "num_blocks": 64}, 3.0, 64),
        ({"num_states": 99, "max_states_per_request": 3, "num_blocks": 32}, 2.0, 32),
        (NO_ATTENTION | {"num_states": 9, "max_states_per_request": 2}, 4.5, 9),
    ],
)
def test_the_scarcer_pool_limits_the_requests(
    sizes: dict[str, int], requests: float, counted: int
) -> None:
    found = info(**sizes)
    assert (found.max_concurrency, found.num_counted_blocks) == (requests, counted)
    assert EngineInfo.from_json(found.to_json()) == found
