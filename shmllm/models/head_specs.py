"""What a model computes of pooled hidden states: projections, classifiers, reward heads.

A head is a chain of products, activations and norms of rows; `heads.py` owns its weights. This
module must not import torch: front ends import it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmllm.models.specs import Activation, NormSpec

HeadActivation = Literal[
    "none", "tanh", "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "sigmoid"
]
ScoreActivation = Literal["none", "sigmoid", "softmax", "relu", "log1p_relu", "log1p_log1p_relu"]
HeadKind = Literal["projection", "classifier", "sparse", "multi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """``act(x @ weight.T + bias)``.

    Attributes:
        name: the name of weight and bias in checkpoints.
        inputs: the width of x.
        outputs: the width of the result.
        bias: whether there is a bias.
        activation: the activation.
        tokens: the tokens whose rows of the LM head are the rows of the weight; if there are two
            and `outputs` is 1, it is the second minus the first, so that the sigmoid of the result
            is the softmax of the two logits. Empty: a checkpoint has the weight itself.
        tied: whether the weight is the table of embeddings.
        parts: the names and widths of several projections of which this is made, side by side;
            empty: it is one.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    activation: HeadActivation = "none"
    tokens: tuple[int, ...] = ()
    tied: bool = False
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormSpec:
    """A norm of rows.

    Attributes:
        name: the name of its weights in checkpoints.
        width: the width of a row.
        norm: what it computes.
    """

    name: str
    width: int
    norm: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """How a query and a document become the prompt of a classifier.

    Attributes:
        template: a text with ``{query}`` and ``{document}``.
        end: the tokens behind it.
    """

    template: str
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head.

    Attributes:
        kind: "projection": its results are embeddings; "classifier": logits; "sparse": a logit for
            each token of the vocabulary, the largest of which over a text make a sparse vector;
            "multi": an embedding of a token and, behind it, the token's weight.
        steps: its parts, in their order.
        labels: the names of the classes, by index.
        activation: what makes scores of logits, a sparse vector of the largest, or weights of
            tokens.
        logit_mean: what is subtracted from logits before their activation, unless somebody says
            otherwise.
        pairs: how pairs become prompts; None: as the tokenizer says.
        precedes_means: whether a mean is one of its results for each token, and not its result for
            the mean of hidden states.
    """

    kind: HeadKind
    steps: tuple[DenseSpec | HeadNormSpec, ...]
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "none"
    logit_mean: float = 0.0
    pairs: PairSpec | None = None
    precedes_means: bool = False

    @property
    def width(self) -> int:
        """The width of its results."""
        return [step.outputs for step in self.steps if isinstance(step, DenseSpec)][-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSpec:
    """What is computed of hidden states in front of the LM head: a projection to their width, an
    activation, and a norm.

    Attributes:
        activation: the activation.
        bias: whether the projection has a bias.
    """

    activation: Activation
    bias: bool
