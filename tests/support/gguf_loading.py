"""What an engine makes of a GGUF file, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.model_helpers import allocate

from shmllm.formats.gguf_pieces import pieces_of, read_pieces
from shmllm.frontend.gguf.config import model_config
from shmllm.models.config import ModelConfig
from shmllm.models.create import create_model, stored_parts
from shmllm.models.decoder import DecoderModel
from shmllm.models.weights import load_weights, stored_kinds


def loaded(file: Path, directory: Path) -> DecoderModel:
    """The model of a file, in float32 and with the file's packed matrices.

    Args:
        file: the file, or a piece of a model.
        directory: where the model directory is made, which must not exist.
    """
    directory.mkdir()
    pieces = pieces_of(file)
    for piece in pieces:
        (directory / piece.name).symlink_to(piece)
    (directory / "config.json").write_text(json.dumps(model_config(read_pieces(pieces))))
    config = ModelConfig.from_directory(directory)
    parts = stored_parts(config, stored_kinds(directory, config.tie_word_embeddings))
    model = create_model(config, torch.float32, allocate, None, parts)
    load_weights(model, directory)
    return model
