"""Activation checkpointing: none, selective, by layer, offloaded; chosen by free memory, with a fallback.

All modes give the same gradients, bit for bit: the choice trades time for memory. MLPs in tiles, the last resort, round
gradients otherwise.
"""

import gc
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from qerl_kernels import addend_checkpoint_contexts, selective_checkpoint_contexts
from torch import nn
from transformers import PreTrainedModel

from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.families import Family, family_of
from qerl_pl.models.memory import GIB, free_bytes, free_cpu_bytes, pinned_bytes
from qerl_pl.models.memory_plan import SAFETY_FACTOR, MicroBatch, activation_bytes
from qerl_pl.models.shape import Shape
from qerl_pl.policy.activation_offload import ActivationOffload
from qerl_pl.policy.lora import ADAPTER, LoraLinear
from qerl_pl.policy.packed_layers import GatedMLP, tile_mlps
from qerl_pl.runtime.communicator import Communicator, warn_of_this_rank
from qerl_pl.runtime.random_state import random_state, set_random_state

log = logging.getLogger(__name__)

T = TypeVar("T")

Checkpointing = bool | Literal["selective", "offload", "auto"]
Tiles = int | Literal["auto"] | None
MODES: tuple[Checkpointing, ...] = (False, "selective", True, "offload")
"""Modes that "auto" tries, from the fastest to the one that needs the least memory."""
TILE_TOKENS = 4096
"""`mlp_tile_tokens` where "auto" takes tiles."""


class MemorySettings(NamedTuple):
    """What an update saves, and how much of its MLPs it computes at once."""

    mode: Checkpointing
    tile_tokens: int | None = None
    """Tokens of an MLP's tile; None for no tiles."""


def candidate_settings(mode: Checkpointing, tiles: Tiles, can_tile: bool) -> tuple[MemorySettings, ...]:
    """Settings to choose from, as `PolicyConfig` sets them, in the order of "auto": the last needs the least memory.

    `can_tile` says whether "auto" may take tiles: the model has such MLPs, and no dropout.
    """
    set_by_hand = None if tiles == "auto" else tiles
    if mode != "auto":
        return (MemorySettings(mode, set_by_hand),)
    tiled: tuple[Checkpointing, ...] = (True, "offload") if tiles == "auto" and can_tile else ()
    return (
        *(MemorySettings(one, set_by_hand) for one in MODES),
        *(MemorySettings(one, TILE_TOKENS) for one in tiled),
    )


class ActivationCheckpointing:
    """Activation checkpointing of a policy's layers, and the tiles of their MLPs.

    Args:
        base: The causal LM, its adapter attached.
        requested: One of `MODES`, or "auto": every layer is checkpointed until `choose_mode` is called.
        has_dropout: Whether recomputation must restore random states.
        dtype: Data type of activations; the parameters may be float32 master weights.
        mlp_tile_tokens: As `PolicyConfig.mlp_tile_tokens`.
        reference: A second model, whose MLPs are tiled alike.

    Raises:
        UserError: Tiles are asked for and the model has no MLPs for them.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        requested: Checkpointing,
        has_dropout: bool,
        dtype: torch.dtype,
        mlp_tile_tokens: Tiles = None,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self._base, self._reference, self._has_dropout, self._dtype = base, reference, has_dropout, dtype
        self._enabled = False
        can_tile = not has_dropout and any(type(module) is GatedMLP for module in base.modules())
        self.candidates = candidate_settings(requested, mlp_tile_tokens, can_tile)
        """Settings to choose from."""
        self._is_named_by_tiles = mlp_tile_tokens == "auto"
        self._pending_state_bytes = 8.0  # of AdamW in float32
        self._tokens, self._ranks = 0, 1
        self._offload: ActivationOffload | None = None
        self._use(MemorySettings(True, self.candidates[0].tile_tokens) if requested == "auto" else self.candidates[0])
        self.automatic = len(self.candidates) > 1
        self.chosen = not self.automatic

    @property
    def mode(self) -> Checkpointing:
        """Current mode."""
        return self.settings.mode

    def saved_activations(self) -> AbstractContextManager[object]:
        """Context of the decoder's forward pass, for what the layers' checkpoints save."""
        return nullcontext() if self._offload is None else self._offload

    def state(self) -> str | None:
        """The name of what "auto" chose, for a checkpoint; None before the choice and for other settings."""
        return self._name(self.settings) if self.automatic and self.chosen else None

    def load(self, state: str | None) -> None:
        """Restore what `state` returned; what is set in the configuration stays."""
        saved = {self._name(settings): settings for settings in self.candidates}.get(state or "")
        if self.automatic and saved is not None:
            self._use(saved)

    def _name(self, settings: MemorySettings) -> str:
        """The mode as YAML spells it, with the tiles where "auto" took them."""
        tiles = f", mlp_tile_tokens {settings.tile_tokens}" if self._is_named_by_tiles and settings.tile_tokens else ""
        return mode_name(settings.mode) + tiles

    def set_state_bytes(self, measure: Callable[[], float]) -> None:
        """Set the bytes per trained weight that the optimizer has still to allocate, measured if a choice is due."""
        if not self.chosen:
            self._pending_state_bytes = measure()

    def choose_mode(self, tokens: int, ranks: Communicator, max_seqlen: int | None = None) -> None:
        """Choose, once, the first settings for which a micro-batch fits every rank. Collective.

        Args:
            tokens: Tokens of the largest micro-batch.
            ranks: All training processes.
            max_seqlen: Tokens of its longest sequence; None takes all of them for one sequence.
        """
        self._tokens, self._ranks = max(self._tokens, tokens), ranks.size
        if self.chosen:
            return
        gathered = ranks.all_gather((tokens, max_seqlen or tokens, free_bytes(self._base.device), free_cpu_bytes()))
        tokens = self._tokens = max(count for count, *_ in gathered)
        max_seqlen = max(length for _, length, *_ in gathered)
        free = min((size for *_, size, _ in gathered if size is not None), default=None)
        offloads = self._pinned_bytes() <= min(on_cpu for *_, on_cpu in gathered)
        candidates = self._allowed(self.candidates, offloads)
        needs = {settings: self.needed_bytes(settings, tokens, max_seqlen) for settings in candidates}
        self._use(
            next((settings for settings in candidates if free is None or needs[settings] <= free), candidates[-1])
        )
        log.info(
            "gradient_checkpointing auto takes %s: a micro-batch of %d tokens needs about (GiB) %s, and %s",
            self._name(self.settings),
            tokens,
            "; ".join(f"{self._name(settings)} {size / GIB:.1f}" for settings, size in needs.items()),
            "what a GPU has free is not known here" if free is None else f"{free / GIB:.1f} GiB are free",
        )

    def synchronize_mode(self, ranks: Communicator) -> None:
        """After a fallback on one rank, all ranks use its settings. Collective."""
        if self.automatic and ranks.size > 1:
            settings = self.candidates[max(ranks.all_gather(self.candidates.index(self.settings)))]
            if settings != self.settings:
                self._use(settings)

    def needed_bytes(self, settings: MemorySettings, tokens: int, max_seqlen: int | None = None) -> int:
        """Bytes that an update will allocate for micro-batches of so many tokens, estimated: activations, and gradients
        and optimizer states not yet held. `max_seqlen` is as for `choose_mode`."""
        modules, shape = list(self._base.modules()), Shape.of(self._base.config)
        norms = (module for module in modules if isinstance(module, Float32RMSNorm))
        trained = [parameter for parameter in self._base.parameters() if parameter.requires_grad]
        batch = MicroBatch(
            tokens,
            # Only scores that are in memory need much more for fewer sequences.
            max(tokens // max_seqlen, 1) if max_seqlen and shape.soft_capped else 1,
            dtype=self._dtype,
            checkpointing=settings.mode,
            mlp_tile_tokens=settings.tile_tokens,
            train_norms=any(norm.weight.requires_grad for norm in norms),
            rank=max((module.r[ADAPTER] for module in modules if isinstance(module, LoraLinear)), default=0),
            full_finetuning=self._base.get_output_embeddings().weight.requires_grad,
        )
        gradients = sum(parameter.nbytes for parameter in trained if parameter.grad is None)
        states = int(self._pending_state_bytes * sum(parameter.numel() for parameter in trained))
        activations = activation_bytes(shape, batch)
        return int(SAFETY_FACTOR * activations) + gradients + states

    def _pinned_bytes(self) -> int:
        """Bytes of pinned memory that "offload" takes, as if every rank ran on this machine."""
        config = self._base.config
        return self._ranks * pinned_bytes(config.num_hidden_layers, config.hidden_size, self._tokens, self._dtype)

    def _allowed(self, candidates: Sequence[MemorySettings], offloads: bool) -> list[MemorySettings]:
        """Candidates that fit into the CPU's memory, without tiles of "auto" that cut no micro-batch so far."""
        largest = self._tokens if self._is_named_by_tiles else math.inf
        cut = [one for one in candidates if one.tile_tokens is None or one.tile_tokens < largest]
        return [one for one in cut if offloads or one.mode != "offload"]

    def run_with_oom_fallback(self, work: Callable[[], T], parameters: Sequence[nn.Parameter]) -> T:
        """Run forward and backward passes; if they run out of memory in "auto", repeat them in the next settings.

        Gradients, which the parameters do not have before, and random numbers are those of a first attempt, up to the
        rounding by tiles. OutOfMemoryError in the last settings, or not in "auto", is raised.

        Args:
            work: All micro-batches of an optimizer step: repeating only the last one would need a second set of
                gradients beside the sum, as large as the model in full fine-tuning.
            parameters: Receive the gradients.
        """
        while (following := self._next_settings()) is not None:
            state = random_state() if self._has_dropout else None
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            # Outside the except clause, so that the traceback does not keep the attempt's tensors alive.
            torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)
            for parameter in parameters:
                parameter.grad = None
            if state is not None:
                set_random_state(state)
            self._fall_back(following, reason)
        return work()

    def _next_settings(self) -> MemorySettings | None:
        """The next one that needs less memory of the GPU and has that of the CPU; None after the last."""
        later = self.candidates[self.candidates.index(self.settings) + 1 :] if self.automatic else ()
        offloads = self.mode == "offload" or self._pinned_bytes() <= free_cpu_bytes()
        allowed = self._allowed(later, offloads)
        if self.mode == "offload":
            allowed = [settings for settings in allowed if settings.mode == "offload"]
        return next(iter(allowed), None)

    def _fall_back(self, settings: MemorySettings, reason: str) -> None:
        before = self.settings
        self._use(settings)
        message = "gradient_checkpointing auto goes on with %s, for %s ran out of memory: %s"
        warn_of_this_rank(log, message, self._name(settings), self._name(before), reason)
        gc.collect()
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    def _use(self, settings: MemorySettings) -> None:
        """Set up the layers."""
        self.settings, self.chosen = settings, True
        if settings.mode != "offload":
            self._offload = None
        elif self._offload is None:
            self._offload = ActivationOffload(self._base.config.hidden_size, self._dtype)
        for model in (self._base, self._reference):
            if model is not None:
                tile_mlps(model, settings.tile_tokens)
        self._apply()

    def _apply(self) -> None:
        if self.mode is False:
            if self._enabled:
                self._base.gradient_checkpointing_disable()
            return
        self._enabled = True
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self._has_dropout}
        family = family_of(self._base.config.model_type)
        is_added = not family.normed_outputs
        assert not is_added or _ends_with_sum(self._base, family), "a norm after the MLP needs its result"
        if self.mode == "selective":
            # Products of tiled MLPs are not saved: the last one is then no addend of the result.
            added = is_added and self.settings.tile_tokens is None and _saves_all_products(self._base)
            settings["context_fn"] = partial(selective_checkpoint_contexts, last_is_added=added)
        elif is_added:
            settings["context_fn"] = addend_checkpoint_contexts
        self._base.gradient_checkpointing_enable(settings)
        self._base.disable_input_require_grads()  # only reentrant checkpoints need it, and it costs products


def mode_name(mode: Checkpointing) -> str:
    """A mode as YAML spells it."""
    return str(mode).lower()


def _ends_with_sum(base: nn.Module, family: Family) -> bool:
    """Whether no norm follows a layer's MLP, so that no gradient depends on the values of the MLP's result."""
    matches = (re.search(r"\.layers\.\d+\.(\w*norm)$", name) for name, _ in base.named_modules())
    return {match[1] for match in matches if match} <= set(family.noisy_norms)


def _saves_all_products(base: nn.Module) -> bool:
    """Whether selective checkpointing saves every linear's product: of PyTorch's linears those with an adapter."""
    adapted = {id(inner) for module in base.modules() if isinstance(module, LoraLinear) for inner in module.modules()}
    linears = (m for name, m in base.named_modules() if isinstance(m, nn.Linear) and ".layers." in name)
    return all(id(linear) in adapted for linear in linears)
