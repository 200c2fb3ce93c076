"""What a family of models is in GGUF files: how such a file stores the tensors of a checkpoint.

The names on one side are llama.cpp's, on the other transformers'. `gguf_families.py` has the
families. This module must not know the fields of config.json, nor import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

_EXPERT = re.compile(r"(?:(?<=experts\.)|(?<=norms\.))\d+(?=\.)")
NUM_HEADS, NUM_KV_HEADS = "attention.head_count", "attention.head_count_kv"
"""The keys, below the architecture's prefix, of the numbers of heads of queries, and of keys and
values."""

_PERMUTED = re.compile(r"(?:v\.)?blk\.\d+\.attn_(q|k|qkv)\.\w+")
_HEADS_KEYS: dict[str, tuple[str | None, ...]] = {
    "q": (NUM_HEADS,),
    "k": (NUM_KV_HEADS,),
    "qkv": (NUM_HEADS, NUM_KV_HEADS, None),
}
_NORM = re.compile(r".*norm\.weight")
_KINDS = ("weight", "bias")
_TENSORS = (".weight", ".bias", ".scale", "ssm_a", "ssm_d")
"""The ends of the names of tensors."""
_FUSED_GATES = "mlp.gate_up_proj", "mlp.gated_layers", "mlp.Wi"
"""A checkpoint's names of gates and ups in one matrix."""

Layout = Literal["same", "transposed", "row", "flat", "channels", "heads", "frames"]


class HeadRows(NamedTuple):
    """How many rows of a tensor of a file one of the checkpoint's tensors has.

    Attributes:
        key: the key, below the architecture's prefix, of a number of heads.
        num_parts: how many rows it has for each row of such a head.
    """

    key: str
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a checkpoint has the values of a tensor of a file.

    Attributes:
        name: the checkpoint's name. A name with ``{}`` stands for all experts, all heads, or all of
            several matrices, which the file has in one tensor.
        layout: "same"; "transposed": the checkpoint has the last two of several dimensions the
            other way round; "row": the checkpoint has a matrix of one row, the file that or a
            vector;
            "flat": the checkpoint has a vector of what the file has in rows, of one element
            each or as many rows as `num_rows` says;
            "channels": the checkpoint has a matrix of one row for each channel of a convolution,
            the file a row;
            "heads": the checkpoint has the rows of each key head, behind those of the queries that
            it serves and before those of its value head; the file has those of all queries before
            those of all keys and all values.
            "frames": the checkpoint has the matrices of several frames side by side in a dimension
            of its own, before the last two; the file has a tensor for each of them.
        part: the number of this tensor among those that make the checkpoint's one.
        num_parts: how many tensors of the file these are.
        in_turn: whether their rows take turns, the rows `part`, `part + num_parts` and so on of
            each expert being this tensor's; False: those of a matrix follow each other part by
            part.
        is_decay: whether the file has ``-exp(x)`` of each number x of the checkpoint's.
        others: further tensors of the checkpoint whose rows follow those of `name` in the file's
            tensor, or in that of each expert.
        heads: how many rows each of `names` has, in heads that are all of the same width; empty: as
            many as the others.
        num_rows: the key, below the architecture's prefix, of the number of rows.
        is_read_alone: whether files that are written have other tensors in place of this one.
    """

    name: str
    layout: Layout = "same"
    part: int = 0
    num_parts: int = 1
    in_turn: bool = True
    is_decay: bool = False
    others: tuple[str, ...] = ()
    heads: tuple[HeadRows, ...] = ()
    num_rows: str = ""
    is_read_alone: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors of the checkpoint."""
        return self.name, *self.others

    def under(self, form: str) -> Place:
        """Returns the place with ``form`` for each name, in which "{}" stands for the name."""
        name, *others = (form.replace("{}", each) for each in self.names)
        return replace(self, name=name, others=tuple(others))


Places = Mapping[str, str | Place]
"""Places by the file's names of modules, to which ``.weight`` or ``.bias`` are appended on both
sides, or of tensors, with these endings, where the checkpoint has others; or without one, if the
checkpoint's name has it."""

OUTSIDE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""The modules outside of layers, by their names in a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """A family of models in GGUF files.

    Attributes:
        title: its name for people.
        architecture: transformers' class.
        model_type: transformers' model type.
        modules: the places of what a layer has, below the layer.
        in_attention: the places of what has another meaning in layers with attention.
        attention_layers: the numbers of the layers of a file that have attention; only
            `family_of` sets it, of families with `in_attention`.
        forms: by the names of modules that only some files have: the places that differ in these,
            that of the module included.
        outside: the places of all others.
        layers: what a checkpoint's names of layers begin with.
        stored_layers: what a file's names of layers begin with.
        is_permuted: whether the rows of queries and keys are in llama.cpp's order, in which it
            rotates neighbouring rows of a head together; transformers rotates the two halves.
        is_partial: whether only a part of each head may be rotated.
        head_count: the key of the number of heads of queries and of keys; None: they have NUM_HEADS
            and NUM_KV_HEADS.
        norm_offset: what the file's weights of norms have more than a checkpoint's.
        is_hybrid: whether only some layers have attention; the file says that others have 0 heads
            of keys.
        has_mixers_alone: whether layers are a mixer with a state and nothing else.
        has_own_widths: whether heads or MLPs of layers have other widths or numbers than each
            other's.
        has_value_width: whether values may have another width than keys.
        has_delta_nets: whether the layers without attention are gated delta nets, with attention
            that has gates in the others.
        has_tiled_heads: whether value head i of a delta net has the key head i modulo their number,
            where a checkpoint has the value heads of a key head one behind the other.
        has_latents: whether attention is that to latents.
        is_written: whether such files are written, too, and not read alone.
        needs_head: whether llama.cpp reads no file without a matrix of the LM head.
        also: further classes of transformers whose models, or whose language models, are stored in
            the same way.
    """

    title: str
    architecture: str
    model_type: str
    modules: Places
    in_attention: Places = field(default_factory=dict)
    attention_layers: frozenset[str] = frozenset()
    forms: Mapping[str, Places] = field(default_factory=dict)
    outside: Places = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    stored_layers: str = "blk"
    is_permuted: bool = False
    is_partial: bool = False
    head_count: str | None = None
    norm_offset: float = 0.0
    is_hybrid: bool = False
    has_mixers_alone: bool = False
    has_own_widths: bool = False
    has_value_width: bool = False
    has_delta_nets: bool = False
    has_tiled_heads: bool = False
    has_latents: bool = False
    is_written: bool = True
    needs_head: bool = False
    also: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes of transformers."""
        return self.architecture, *self.also

    @property
    def has_fused_gate(self) -> bool:
        """Whether gate and up of an MLP are one tensor of a file, which calls it up."""
        return self.modules.get("ffn_up") in _FUSED_GATES

    def form(self, has: Callable[[str, str], bool]) -> GgufFamily:
        """Returns the family with the places of the form that a model has.

        Args:
            has: says whether the model has a module, by the names of a file and of a checkpoint.
        """
        modules = dict(self.modules)
        for name, places in self.forms.items():
            if has(name, as_place(places[name]).name):
                modules |= places
        return replace(self, modules=modules)

    def place(self, stored: str) -> Place:
        """Returns the place of a tensor of a file, with the checkpoint's whole name; the same name
        if a checkpoint has no such tensor."""
        found = re.fullmatch(rf"{re.escape(self.stored_layers)}\.(\d+)\.(.+)", stored)
        prefix, name = ("", stored) if found is None else (f"{self.layers}.{found[1]}.", found[2])
        for known, place in _tensors(self.outside if found is None else self._of_layer(found[1])):
            if known == name:
                return place.under(f"{prefix}{{}}")
        return Place(name=stored)

    def _of_layer(self, layer: str) -> Places:
        """The places of what this layer has."""
        if layer not in self.attention_layers:
            return self.modules
        return {**self.modules, **self.in_attention}

    def stored_names(self, name: str) -> list[tuple[str, int, Place]]:
        """Returns where a written file has a checkpoint's tensor: its name there, the number of the
        expert that it belongs to, 0 without experts, and the place; empty: it has no such tensor.
        """
        found = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", name)
        if found is None:
            return [(known, 0, at) for known, at in _tensors(self.outside) if at.name == name]
        expert = _EXPERT.search(found[2])
        wanted, number = _EXPERT.sub("{}", found[2]), int(expert[0]) if expert else 0
        return [
            (f"{self.stored_layers}.{found[1]}.{known}", number, place)
            for known, place in _tensors(self.modules)
            if place.name == wanted and not place.is_read_alone
        ]

    @property
    def written_modules(self) -> set[str]:
        """The keys of `modules` that written files have."""
        return {known for known, at in self.modules.items() if not as_place(at).is_read_alone}

    def heads_keys(self, stored: str, number: int = 0) -> tuple[str, ...]:
        """Returns the keys, below the architecture's prefix, of the numbers of heads whose rows
        have another order in a tensor of a file, or in what the tensor of this number among
        `Place.names` has of it; empty: its rows are in a checkpoint's order."""
        if self.place(stored).layout == "heads":
            return NUM_HEADS, NUM_KV_HEADS
        found = _PERMUTED.fullmatch(stored) if self.is_permuted else None
        key = _HEADS_KEYS[found[1]][number] if found else None
        key = key and (self.head_count or key)
        return () if key is None else (key,)

    def offset(self, stored: str) -> float:
        """Returns what the values of a tensor of a file have more than a checkpoint's."""
        is_of_stream = _NORM.fullmatch(stored) and not stored.endswith("ssm_norm.weight")
        return self.norm_offset if is_of_stream else 0.0


def as_place(value: str | Place) -> Place:
    """Returns a place; a name stands for one that has nothing else."""
    return Place(name=value) if isinstance(value, str) else value


def is_tensor(known: str) -> bool:
    """Returns whether a key of `Places` is the name of a tensor, and not of a module."""
    return known.endswith(_TENSORS)


def _tensors(places: Places) -> Iterator[tuple[str, Place]]:
    """The tensors of a table, by their whole names in the file."""
    for known, value in places.items():
        place = as_place(value)
        if is_tensor(known) or place.name.endswith(".weight"):  # of a name without an ending
            yield known, place
            continue
        for kind in _KINDS:
            yield f"{known}.{kind}", place.under(f"{{}}.{kind}")
