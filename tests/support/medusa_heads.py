"""Random Medusa heads: their files, and the drafts of a reference of their own formulas, written
after Cai et al., "Medusa", 2024, section 2.1, and its authors' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.draft_heads import initialize, with_margin
from support.one_thread import one_thread
from torch import Tensor


class MedusaHeads(torch.nn.Module):
    """Random heads.

    Args:
        model: the model of transformers that they draft for.
        num_heads: the number of heads.
        num_blocks: the number of residual blocks of each.
        bias: whether these have biases.
        shares_head: whether they have one LM head.
    """

    def __init__(
        self,
        model: Any,
        num_heads: int = 4,
        num_blocks: int = 1,
        bias: bool = False,
        shares_head: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(41)
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self.fields = {
            "hidden_size": hidden,
            "vocab_size": vocab,
            "model_type": "medusa",
            "medusa_fc_bias": bias,
            "original_lm_head": shares_head,
        }
        self.sizes = {"num_heads": num_heads, "num_hidden_layers": num_blocks}
        heads = torch.nn.ModuleList(
            torch.nn.Sequential(
                *(torch.nn.Linear(hidden, hidden, bias) for _ in range(num_blocks)),
                torch.nn.Linear(hidden, vocab, bias=False),
            )
            for _ in range(num_heads)
        )
        self.heads = heads
        initialize(self)
        self.shares_head = shares_head
        own: Any = heads
        for head in own if shares_head else ():
            head[-1] = own[0][-1]
        self.targets = torch.arange(vocab)

    def save(self, directory: Path, form: str = "vllm") -> Path:
        """Writes the files with the names of vLLM, or of the authors."""
        directory.mkdir()
        sizes = self.sizes if form == "vllm" else {f"medusa_{k}": v for k, v in self.sizes.items()}
        (directory / "config.json").write_text(json.dumps(self.fields | sizes))
        weights: dict[str, Tensor] = {}
        heads: Any = self.heads
        for number, head in enumerate(heads):
            *blocks, last = head
            for layer, block in enumerate(blocks):
                name = f"{number}.{layer}.linear"
                name = f"blocks.{number}.layers.{layer}" if form == "vllm" else name
                weights |= {f"{name}.{key}": value for key, value in block.state_dict().items()}
            name = f"lm_heads.{number}" if form == "vllm" else f"{number}.{len(blocks)}"
            if not self.shares_head:
                weights[f"{name}.weight"] = last.weight.detach()
        if self.shares_head:
            weights["lm_head.weight"] = heads[0][-1].weight.detach()
        weights = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(weights, directory / "model.safetensors")
        return directory

    @one_thread()
    @torch.inference_mode()
    def drafts(self, model: Any, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts behind tokens of which the model has computed all but the last one.

        Returns:
            The drafts, and by how much their logits are ahead of the others at least.
        """
        given = torch.tensor([token_ids[:-1]])
        last = model(given, output_hidden_states=True).hidden_states[-1][0, -1]
        rows, heads = [], list(self.heads)
        own: Any = heads[:count]
        for head in own:
            *blocks, lm_head = head
            state = last
            for block in blocks:
                state = state + torch.nn.functional.silu(block(state))
            rows.append(lm_head(state))
        return with_margin(torch.stack(rows), self.targets)
