"""What is refused of a model with experts for text and others for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision_models import make_vision_model

from shmllm import LLM
from shmllm.errors import EngineStartError

OPTIONS: dict[str, Any] = {"multiprocess": False, "max_model_len": 64, "num_threads": 1}
OPTIONS |= {"kv_cache_memory_bytes": 2**22}


def test_embeddings_of_prompts_and_reports_of_experts_are_refused(tmp_path: Path) -> None:
    make_vision_model("ernie4_5_vl_moe", tmp_path, num_hidden_layers=2)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (output,) = llm.generate({"prompt_embeds": torch.zeros(4, 64)}, use_tqdm=False)
        assert "the ids of tokens decide which experts they have" in str(output.error)
    with pytest.raises(EngineStartError, match="experts for text and others for images"):
        LLM(str(tmp_path), enable_return_routed_experts=True, **OPTIONS)
