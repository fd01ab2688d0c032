"""Activation checkpointing: none, selective, by layer, offloaded; chosen by free memory, with a fallback.

All modes give the same gradients, bit for bit: the choice trades time for memory.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from qerl_kernels import selective_checkpoint_contexts
from torch import nn
from transformers import PreTrainedModel

from qerl_pl.distributed.communicator import Communicator, warn_of_this_rank
from qerl_pl.formats.architecture import family_of
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.memory import GIB, free_bytes
from qerl_pl.memory_plan import SAFETY_FACTOR, MicroBatch, Shape, activation_bytes
from qerl_pl.modules.activation_offload import ActivationOffload
from qerl_pl.modules.lora import LoraLinear
from qerl_pl.modules.tiled_mlp import leaving_out_contexts
from qerl_pl.persistence.random_state import random_state, set_random_state

log = logging.getLogger(__name__)

T = TypeVar("T")

Checkpointing = bool | Literal["selective", "offload", "auto"]
MODES: tuple[Checkpointing, ...] = (False, "selective", True)
"""Those that "auto" takes, from the fastest to the one that needs the least memory. "offload" takes the CPU's, too."""


class ActivationCheckpointing:
    """Activation checkpointing of a policy's layers.

    Args:
        base: The causal LM, its adapter attached.
        requested: One of `MODES`, "offload", or "auto": every layer is checkpointed until `choose_mode` is called.
        has_dropout: Whether recomputation must restore random states.
        dtype: Of activations; the parameters may be float32 master weights.
        mlp_tile_tokens: Of the layers' MLPs; None where they are not tiled.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        requested: Checkpointing,
        has_dropout: bool,
        dtype: torch.dtype,
        mlp_tile_tokens: int | None = None,
    ) -> None:
        self._base, self._has_dropout, self._dtype, self._enabled = base, has_dropout, dtype, False
        self._mlp_tile_tokens = mlp_tile_tokens
        self._pending_state_bytes = 8.0  # of AdamW in float32
        self.automatic = requested == "auto"
        self.chosen = not self.automatic
        self.mode: Checkpointing = True if requested == "auto" else requested
        self._offload = ActivationOffload(base.config.hidden_size, dtype) if requested == "offload" else None
        self._apply()

    def saved_activations(self) -> AbstractContextManager[object]:
        """Context of the decoder's forward pass, for what the layers' checkpoints save."""
        return nullcontext() if self._offload is None else self._offload

    def state(self) -> str | None:
        """The mode that "auto" chose, for a checkpoint; None before the choice and for other settings."""
        return mode_name(self.mode) if self.automatic and self.chosen else None

    def load(self, state: str | None) -> None:
        """Restore what `state` returned; a mode set in the configuration stays."""
        if self.automatic and state is not None:
            self._set_mode({mode_name(mode): mode for mode in MODES}[state])

    def set_state_bytes(self, measure: Callable[[], float]) -> None:
        """Set the bytes per trained weight that the optimizer has still to allocate, measured if a choice is due."""
        if not self.chosen:
            self._pending_state_bytes = measure()

    def choose_mode(self, tokens: int, ranks: Communicator) -> None:
        """Choose, once, the fastest mode for which a micro-batch of so many tokens fits every rank. Collective."""
        if self.chosen:
            return
        gathered = ranks.all_gather((tokens, free_bytes(self._base.device)))
        tokens = max(count for count, _ in gathered)
        free = min((size for _, size in gathered if size is not None), default=None)
        needs = {mode: self.needed_bytes(mode, tokens) for mode in MODES}
        self._set_mode(next((mode for mode in MODES if free is None or needs[mode] <= free), True))
        log.info(
            "gradient_checkpointing auto takes %s: a micro-batch of %d tokens needs about (GiB) %s, and %s",
            mode_name(self.mode),
            tokens,
            ", ".join(f"{mode_name(mode)} {size / GIB:.1f}" for mode, size in needs.items()),
            "what a GPU has free is not known here" if free is None else f"{free / GIB:.1f} GiB are free",
        )

    def synchronize_mode(self, ranks: Communicator) -> None:
        """After a fallback on one rank, all ranks use its mode. Collective."""
        if self.automatic and ranks.size > 1:
            mode = MODES[max(ranks.all_gather(MODES.index(self.mode)))]
            if mode != self.mode:
                self._set_mode(mode)

    def needed_bytes(self, mode: Checkpointing, tokens: int) -> int:
        """Bytes that an update will allocate for micro-batches of so many tokens, estimated: activations, and gradients
        and optimizer states not yet held."""
        modules = list(self._base.modules())
        norms = (module for module in modules if isinstance(module, Float32RMSNorm))
        trained = [parameter for parameter in self._base.parameters() if parameter.requires_grad]
        batch = MicroBatch(
            tokens,
            dtype=self._dtype,
            checkpointing=mode,
            mlp_tile_tokens=self._mlp_tile_tokens,
            train_norms=any(norm.weight.requires_grad for norm in norms),
            rank=max((len(module.factors()[0]) for module in modules if isinstance(module, LoraLinear)), default=0),
            full_finetuning=self._base.get_output_embeddings().weight.requires_grad,
        )
        gradients = sum(parameter.nbytes for parameter in trained if parameter.grad is None)
        states = int(self._pending_state_bytes * sum(parameter.numel() for parameter in trained))
        activations = activation_bytes(Shape.of(self._base.config), batch)
        return int(SAFETY_FACTOR * activations) + gradients + states

    def run_with_oom_fallback(self, work: Callable[[], T], parameters: Sequence[nn.Parameter]) -> T:
        """Run forward and backward passes; if they run out of memory in "auto", repeat them in the next mode.

        Gradients and random numbers are those of a first attempt.

        Args:
            work: All micro-batches of an optimizer step: repeating only the last one would need a second set of
                gradients beside the sum, as large as the model in full fine-tuning.
            parameters: Receive the gradients; they have none before.

        Raises:
            OutOfMemoryError: Out of memory with every layer checkpointed, or not in "auto".
        """
        while self.automatic and self.mode is not True:
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
            self._fall_back(reason)
        return work()

    def _fall_back(self, reason: str) -> None:
        before = self.mode
        self._set_mode(MODES[MODES.index(before) + 1])
        message = "gradient_checkpointing auto goes on with %s, for %s ran out of memory: %s"
        warn_of_this_rank(log, message, mode_name(self.mode), mode_name(before), reason)
        gc.collect()
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    def _set_mode(self, mode: Checkpointing) -> None:
        self.mode, self.chosen = mode, True
        self._apply()

    def _apply(self) -> None:
        if self.mode is False:
            if self._enabled:
                self._base.gradient_checkpointing_disable()
            return
        self._enabled = True
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self._has_dropout}
        is_added = not family_of(self._base.config.model_type).normed_outputs
        if self.mode == "selective":
            # Products of tiled MLPs are not saved: the last one is then no addend of the result.
            added = is_added and self._mlp_tile_tokens is None and _saves_all_products(self._base)
            settings["context_fn"] = partial(selective_checkpoint_contexts, last_is_added=added)
        elif is_added and self._mlp_tile_tokens is not None:
            settings["context_fn"] = leaving_out_contexts
        self._base.gradient_checkpointing_enable(settings)
        self._base.disable_input_require_grads()  # only reentrant checkpoints need it, and it costs products


def mode_name(mode: Checkpointing) -> str:
    """A mode as YAML spells it."""
    return str(mode).lower()


def _saves_all_products(base: nn.Module) -> bool:
    """Whether selective checkpointing saves every linear's product: of PyTorch's linears those with an adapter."""
    adapted = {id(inner) for module in base.modules() if isinstance(module, LoraLinear) for inner in module.modules()}
    linears = (m for name, m in base.named_modules() if isinstance(m, nn.Linear) and ".layers." in name)
    return all(id(linear) in adapted for linear in linears)
