"""What the layers of a decoder are, of a mixer, a feed-forward and norms.

This module must not import torch: front ends import it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shmllm.models.branch_specs import BranchSpec
from shmllm.models.combined_specs import FeedForwardSpec
from shmllm.models.compressed_specs import CompressedAttentionSpec
from shmllm.models.mixer_specs import AttentionSpec, MixerSpec, SideBySideSpec
from shmllm.models.specs import MLPSpec
from shmllm_kernels.windows import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The norms of a layer. Each is the weight's name below the layer, such as "input_layernorm",
    or None: the layer has no such norm.

    Attributes:
        before_mixer: reads the residual stream; the mixer reads its output.
        after_mixer: reads the mixer's output, before that is added to the stream.
        before_mlp: as `before_mixer`; without one, the MLP of a parallel layer reads what the mixer
            reads.
        after_mlp: as `after_mixer`.
        of_sums: whether the norms behind mixer and MLP read the stream with the output added, and
            take the stream's place (Vaswani et al., 2017, section 3.1). There are no others then.
        eps_before, eps_behind: what the norms before, and behind, mixer and MLP add to the mean
            square; None: what other norms add.
        gated: those of the norms before mixer and MLP whose output is multiplied by a sigmoid of
            what an MLP without a gate, with SiLU, makes of it (A.X K2).
        gate_rank: the width of these MLPs' activation.
    """

    before_mixer: str | None = None
    after_mixer: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None
    of_sums: bool = False
    eps_before: tuple[float, float] | None = None
    eps_behind: tuple[float, float] | None = None
    gated: tuple[str, ...] = ()
    gate_rank: int = 0

    @property
    def gates(self) -> dict[str, MLPSpec]:
        """What makes the gates of each norm that has some, by the name of the norm."""
        gate = MLPSpec(inner=self.gate_rank, gated=False)
        return dict.fromkeys(self.gated, gate)


PRE_NORMS = LayerNorms(before_mixer="input_layernorm", before_mlp="post_attention_layernorm")
"""The norms of Llama and of most families, under their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer.

    Attributes:
        mixer: its attention, what takes its place, or several such; None: it has an MLP alone.
        mlp: its MLP or its experts; None: it has a mixer alone.
        norms: the norms before and behind both.
        mlp_scale: the factor of what `mlp` reads of a norm.
        mixed_scale: the factor of what the mixer adds to the residual stream, if there is an MLP,
            too; None: that of the model, `ModelConfig.residual_scale`.
        parallel: whether the MLP reads the stream that the mixer reads, and not its sum with the
            mixer's output.
        laurel_rank: the rank of a branch beside the mixer (LAuReL; Menghani et al., 2024), which
            reads what the mixer reads; None: there is none.
        branch: what makes it a layer beside the residual stream; None: it is none.
        behind_branch: whether what its first norm reads is the sum of the stream and the result of
            such a layer before it, which is not added to the stream.
        adds_shortcut: whether it adds to the stream, behind the norm that its MLP reads, what the
            experts of the layer before it have returned; see `ShortcutExpertsSpec`.
    """

    mixer: MixerSpec | SideBySideSpec | None
    mlp: FeedForwardSpec | None
    norms: LayerNorms = PRE_NORMS
    mlp_scale: float = 1.0
    mixed_scale: float | None = None
    parallel: bool = False
    laurel_rank: int | None = None
    branch: BranchSpec | None = None
    behind_branch: bool = False
    adds_shortcut: bool = False

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Its mixers: none, one, or those that are side by side."""
        if self.mixer is None:
            return ()
        return self.mixer.mixers if isinstance(self.mixer, SideBySideSpec) else (self.mixer,)

    @property
    def attention(self) -> AttentionSpec | None:
        """Its attention, if it has one that is not latent."""
        return next((each for each in self.mixers if isinstance(each, AttentionSpec)), None)

    @property
    def window(self) -> Window | None:
        """How many rows of the cache, or the chunk of them, its attention reads; None: all."""
        for mixer in self.mixers:
            if isinstance(mixer, AttentionSpec):
                return mixer.window
            if isinstance(mixer, CompressedAttentionSpec):
                return mixer.kept_window
        return None

    @property
    def dense(self) -> tuple[MLPSpec, ...]:
        """Its dense MLPs, shared experts and what makes gates of its norms included."""
        own = () if self.mlp is None else self.mlp.dense
        return (*own, *self.norms.gates.values())

    def with_mixers(self, change: Callable[[MixerSpec], MixerSpec]) -> LayerSpec:
        """Returns the layer with other mixers, each in the place of one of its own."""
        if self.mixer is None:
            return self
        if not isinstance(self.mixer, SideBySideSpec):
            return replace(self, mixer=change(self.mixer))
        changed = tuple(map(change, self.mixer.mixers))
        return replace(self, mixer=replace(self.mixer, mixers=changed))
