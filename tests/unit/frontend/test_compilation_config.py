"""The GraphConfig made from vLLM's options for CUDA graphs."""

from __future__ import annotations

import enum
import logging
from types import SimpleNamespace

import pytest

from shmllm.config.graphs import CudaGraphMode, GraphConfig
from shmllm.errors import EngineStartError
from shmllm.frontend.options.engine_options import make_engine_config


class CUDAGraphMode(enum.Enum):
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GraphConfig()),
        ({"enforce_eager": True}, GraphConfig(enforce_eager=True)),
        ({"compilation_config": {}}, GraphConfig()),
        ({"compilation_config": {"cudagraph_mode": "piecewise"}}, GraphConfig("PIECEWISE")),
        ({"compilation_config": {"cudagraph_mode": CUDAGraphMode.FULL}}, GraphConfig("FULL")),
        (
            {"compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)},
            GraphConfig("FULL_DECODE_ONLY"),
        ),
        (
            {"compilation_config": {"cudagraph_capture_sizes": [8, 1, 2, 8]}},
            GraphConfig(capture_sizes=(1, 2, 8)),
        ),
        ({"cudagraph_capture_sizes": [4, 2]}, GraphConfig(capture_sizes=(2, 4))),
        ({"max_cudagraph_capture_size": 64}, GraphConfig(max_capture_size=64)),
        (
            {
                "compilation_config": {"cudagraph_mode": "FULL", "max_cudagraph_capture_size": 4},
                "cudagraph_capture_sizes": [4],
            },
            GraphConfig("FULL", (4,), 4),
        ),
    ],
)
def test_graph_options_become_a_graph_config(options, expected, caplog):
    assert make_engine_config("tiny", **options).graphs == expected
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compilation_config": {"cudagraph_mode": "SOME"}}, "cudagraph_mode 'SOME' is not one of"),
        ({"compilation_config": "-O3"}, "compilation_config must be a mapping .*, got '-O3'"),
        ({"cudagraph_capture_sizes": 8}, "cudagraph_capture_sizes must be a list .*, got 8"),
        ({"cudagraph_capture_sizes": [1, "2"]}, "must be a list of whole numbers, got"),
        ({"cudagraph_capture_sizes": [1.5]}, r"must be whole numbers of at least 1, got \[1.5\]"),
        (
            {
                "cudagraph_capture_sizes": [8],
                "compilation_config": {"cudagraph_capture_sizes": [8]},
            },
            "cudagraph_capture_sizes is given twice",
        ),
    ],
)
def test_invalid_graph_options_are_errors(options, words):
    with pytest.raises(EngineStartError, match=words):
        make_engine_config("tiny", **options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": 3, "cudagraph_mode": "FULL"}, "compilation_config: mode has no effect"),
        (2, "compilation_config=2 has no effect"),
    ],
)
def test_compilation_modes_have_no_effect_and_cause_a_warning(given, words, caplog):
    with caplog.at_level(logging.WARNING):
        config = make_engine_config("tiny", compilation_config=given)
    assert words in caplog.text
    assert config.graphs.mode == ("FULL" if given != 2 else GraphConfig().mode)


def test_enforce_eager_captures_no_graphs():
    assert GraphConfig("FULL").effective_mode is CudaGraphMode.FULL
    assert GraphConfig("FULL", enforce_eager=True).effective_mode is CudaGraphMode.NONE
