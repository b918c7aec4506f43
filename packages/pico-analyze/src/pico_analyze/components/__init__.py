"""The table of components: what a metric can be measured on.

A component says which stored tensors it needs (`Component.select`, from a manifest alone) and turns them into
matrices (`Component.pieces`). No torch here: a component is imported when it is used.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol

from pico_analyze import plugins
from pico_analyze.checkpoint.format import Kind, Manifest, Split, TensorRow

if TYPE_CHECKING:
    from pico_analyze.checkpoint.reader import Checkpoint
    from pico_analyze.components.matrix import Matrix

Layers = Sequence[int] | Literal["all"]
MEASURED: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


class ComponentError(ValueError):
    """A component that cannot be had; the message says what there is instead."""


@dataclass(frozen=True)
class Selection:
    """The stored tensors behind one matrix, or behind one for each head.

    ``module`` is the name inside the block (``attention.v_proj``), or the whole name where ``layer`` is None.
    Head None stands for no head in particular, or for all of them side by side.
    """

    layer: int | None
    module: str
    heads: tuple[int | None, ...]
    rows: tuple[TensorRow, ...]
    reference_layer: int | None = None
    """The other layer, where the component takes heads of two layers together."""
    reference_heads: tuple[int, ...] | None = None
    """The head of that layer that belongs to each of ``heads``."""

    @property
    def content_hash(self) -> str:
        """The tensor's own content hash; for several, SHA-256 over theirs, joined."""
        if len(self.rows) == 1:
            return self.rows[0].sha256
        return hashlib.sha256("".join(row.sha256 for row in self.rows).encode("ascii")).hexdigest()

    @property
    def dtype(self) -> str:
        """The dtypes as stored, each once, joined by a plus sign."""
        return "+".join(sorted({row.dtype for row in self.rows}))


@dataclass(frozen=True)
class Piece:
    """One matrix of a component, and where it comes from (see `Selection`)."""

    layer: int | None
    head: int | None
    module: str
    matrix: "Matrix"
    content_hash: str
    dtype: str


class Component(Protocol):
    """A component with its settings filled in."""

    def select(self, manifest: Manifest) -> list[Selection]:
        """What the component finds in a checkpoint; raises `ComponentError` where something is missing."""

    def pieces(self, checkpoint: "Checkpoint", selection: Selection) -> Iterator[Piece]:
        """The matrices of one selection, in the order of its heads."""


class MakeComponent(Protocol):
    """How a component is made from its entry in the configuration."""

    def __call__(
        self,
        kind: Kind,
        split: Split | None,
        layers: Layers,
        layer_suffixes: str | dict[str, str] | None,
        order: Literal["pico_v0"] | None = None,
    ) -> Component:
        """The component; raises `ComponentError` where its settings do not fit it.

        ``layer_suffixes`` is as the entry gives it, ``{"role": role}`` where that gives a role, None without either.
        """


@dataclass(frozen=True)
class ComponentInfo:
    """A line of the table; ``suffixes`` are the keys of ``layer_suffixes``, empty where it is one suffix."""

    path: str
    kinds: tuple[Kind, ...]
    suffixes: tuple[str, ...]
    summary: str
    compared: bool = False
    """Whether it is a difference from the step that the entry of the metric names as target_checkpoint."""
    only: tuple[str, ...] = ()
    """The metrics that fit it; empty where all do."""

    def load(self) -> MakeComponent:
        """Import the component."""
        module, name = self.path.split(":")
        made: MakeComponent = getattr(import_module(module), name)
        return made

    def problem(self) -> str | None:
        """Why the component cannot be used, None where it can; imports it."""
        if not self.kinds or not set(self.kinds) <= set(MEASURED):
            return f"kinds is {self.kinds!r}, not some of {', '.join(MEASURED)}"
        try:
            made = plugins.resolved(self.path)
        except plugins.PluginError as error:
            return f"path: {error}"
        return None if callable(made) else f"path: {self.path!r} cannot be called"


OF_COMPOSITION = ("composition_score", "stable_rank", "effective_rank", "per", "spectral_entropy")
"""What only needs the singular values, which are all that is known of a composition."""

COMPONENTS: dict[str, ComponentInfo] = {
    "simple": ComponentInfo(
        path="pico_analyze.components.single:Simple",
        kinds=("weights", "activations", "gradients", "optimizer"),
        suffixes=(),
        summary="one stored tensor: a module's weight, its output, the gradient of its weight, or a moment of that, "
        "named <module>.exp_avg or <module>.exp_avg_sq, under Muon <module>.momentum_buffer",
    ),
    "delta": ComponentInfo(
        path="pico_analyze.components.single:Delta",
        kinds=("weights",),
        suffixes=(),
        summary="what has changed in a weight since target_checkpoint: W_t - W_s",
        compared=True,
    ),
    "ov_circuit": ComponentInfo(
        path="pico_analyze.components.circuits:OVCircuit",
        kinds=("weights", "activations", "gradients"),
        suffixes=("value_layer", "output_layer"),
        summary="what a head writes for what it reads, W_O W_V: per head, and all heads side by side",
    ),
    "qk_circuit": ComponentInfo(
        path="pico_analyze.components.circuits:QKCircuit",
        kinds=("weights", "gradients"),
        suffixes=("query_layer", "key_layer"),
        summary="where a head looks, W_Q' W_K, without scale and rotary embedding: per head, and all heads side by side",
    ),
    "full_ov_circuit": ComponentInfo(
        path="pico_analyze.components.vocabulary:FullOVCircuit",
        kinds=("weights",),
        suffixes=("value_layer", "output_layer"),
        summary="how a head moves all logits for the token that it reads, W_U W_O W_V W_E: eigenvalues, per head",
        only=("eigenvalue_positivity",),
    ),
    "q_composition": ComponentInfo(
        path="pico_analyze.components.composition:QComposition",
        kinds=("weights",),
        suffixes=("query_layer", "key_layer", "value_layer", "output_layer"),
        summary="how much of what a head writes the queries of a head of a later layer read: W_QK' W_OV over their norms",
        only=OF_COMPOSITION,
    ),
    "k_composition": ComponentInfo(
        path="pico_analyze.components.composition:KComposition",
        kinds=("weights",),
        suffixes=("query_layer", "key_layer", "value_layer", "output_layer"),
        summary="how much of what a head writes the keys of a head of a later layer read: W_QK W_OV over their norms",
        only=OF_COMPOSITION,
    ),
    "v_composition": ComponentInfo(
        path="pico_analyze.components.composition:VComposition",
        kinds=("weights",),
        suffixes=("value_layer", "output_layer"),
        summary="how much of what a head writes the values of a head of a later layer read: W_OV W_OV over their norms",
        only=OF_COMPOSITION,
    ),
}


def get_component(name: str, table: Mapping[str, ComponentInfo] = COMPONENTS) -> ComponentInfo:
    """The component of that name.

    Raises:
        ComponentError: there is none; the message lists those there are and the nearest.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ComponentError(f"there is no component {name!r}; there are {', '.join(table)}{hint}")


def load_components(names: Sequence[str] = ()) -> dict[str, ComponentInfo]:
    """Our table and those of the plugins: modules or files that hold a dict ``COMPONENTS`` of the same kind.

    Raises:
        PluginError: a plugin cannot be used, or two tables use one name.
    """
    return plugins.merged(COMPONENTS, "COMPONENTS", names)
