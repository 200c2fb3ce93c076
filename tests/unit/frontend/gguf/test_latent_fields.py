"""The class of the architecture deepseek2, of which files without ``expert_gating_func`` do not say
how experts are chosen."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from support.gguf_models import write_model
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import reference_model

from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import model_config
from shmllm.frontend.gguf.latent_fields import OF_LATENTS
from shmllm.frontend.gguf.metadata import Metadata


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "expected"),
    [(47, 154_880, "deepseek_v3"), (47, 102_400, "deepseek_v2"), (27, 154_880, "deepseek_v2")],
)
def test_the_first_files_of_glm_flash_have_sigmoids(
    num_layers: int, vocab_size: int, expected: str, tmp_path: Path
) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["deepseek2.expert_gating_func"]

    family, options = READ_ALONE["glm4.7 flash"]
    header = read_header(
        write_model(tmp_path / "m.gguf", reference_model(family, **options), without)
    )
    sizes = {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    sizes |= {"model_type": "deepseek_v3", "head_dim": options["qk_rope_head_dim"]}
    config = model_config(header) | sizes
    fields = config | OF_LATENTS["deepseek_v3"](Metadata(header), config)
    assert fields["model_type"] == expected
