"""What the runners of all devices have in common: a loaded model, and what requests bring along.

Owns the parts of a runner that live on the host whatever computes. Must not know how steps are run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from shmllm.config.engine import EngineConfig
from shmllm.core.constraint import Constraint
from shmllm.models.decoder import DecoderModel
from shmllm.worker.grammar import GrammarCompiler
from shmllm.worker.loading import LoadedModel
from shmllm.worker.pooler import Pooler
from shmllm.worker.prompt_embeds import EmbedsByRow, check_prompt_embeds
from shmllm.worker.token_masks import TokenMasks


class LoadedRunner:
    """
    Args:
        config: of the engine.
        loaded: the model.

    Attributes:
        masks: of constrained requests.
        pooler: of pooling requests.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        num_rows = config.scheduler.max_num_seqs
        directory = Path(config.load.tokenizer_directory or config.load.directory)
        self._loaded = loaded
        self._grammars = GrammarCompiler(directory, loaded.config.eos_token_ids)
        self._prompt_embeds = EmbedsByRow()
        self.masks = TokenMasks(self._grammars, num_rows)
        self.pooler = Pooler(num_rows, loaded.config.hidden_size)

    @property
    def model(self) -> DecoderModel:
        """What computes; its weights may be replaced between two steps."""
        return self._loaded.model

    def reload_weights(self, directory: str | None) -> None:
        """See `LoadedModel.reload`."""
        self._loaded.reload(directory)

    def check_embeds(self, embeds: torch.Tensor, length: int) -> torch.Tensor:
        """A prompt's embeddings in the model's dtype; RequestError if they are none."""
        shape = (length, self.model.config.hidden_size)
        return check_prompt_embeds(embeds, shape, self.model.dtype)

    def compile_grammar(self, text: str) -> Future[Callable[[], Constraint]]:
        """What begins an output under this grammar, at once or later."""
        return self._grammars.compile(text)
