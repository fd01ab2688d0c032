"""What the backward pass computes again (each layer, what is cheap of it, or nothing), and the choice by free memory.

All three give the same gradients, bit for bit: the choice is one of time against memory.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from qerl_kernels import selective_checkpoint_contexts
from qerl_kernels.logprob import CHUNK_BYTES
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.distributed.communicator import Communicator, warn_of_this_rank
from qerl_pl.engines.capacity import GIB
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.modules.lora import LoraLinear

log = logging.getLogger(__name__)

T = TypeVar("T")

Checkpointing = bool | Literal["selective", "auto"]

MODES: tuple[Checkpointing, ...] = (False, "selective", True)

"""From the fastest to the one that needs the least memory."""

SPARE = 1.1

"""What an estimate is multiplied by: blocks that fit no tensor, and what it does not count."""


class ActivationCheckpointing:
    """How a policy's layers are checkpointed.

    Args:
        base: The causal LM, its adapter attached.
        asked: One of `MODES`, or "auto": each layer is recomputed until `choose` knows better.
        random: Whether a forward pass draws random numbers, which a recomputation must draw again.
        dtype: Of activations: the base's own parameters may be float32 masters.
    """

    def __init__(self, base: PreTrainedModel, asked: Checkpointing, random: bool, dtype: torch.dtype) -> None:
        self._base, self._random, self._dtype, self._applied = base, random, dtype, False
        self._state_to_come = 8.0  # of AdamW in float32
        self.automatic = asked == "auto"
        self.chosen = not self.automatic
        self.mode: Checkpointing = True if asked == "auto" else asked
        self._apply()

    def state(self) -> str | None:
        """The choice that "auto" made, for a checkpoint; None where it made none."""
        return name(self.mode) if self.automatic and self.chosen else None

    def load(self, state: str | None) -> None:
        """Take over what `state` gave; where the configuration says what to recompute, that stays."""
        if self.automatic and state is not None:
            self._take({name(mode): mode for mode in MODES}[state])

    def _take(self, mode: Checkpointing) -> None:
        self.mode, self.chosen = mode, True
        self._apply()

    def set_state_bytes(self, measure: Callable[[], float]) -> None:
        """Have the choice, where it is still to be made, count on what the optimizer will hold and does not yet.

        Args:
            measure: Gives the bytes a trained weight.
        """
        if not self.chosen:
            self._state_to_come = measure()

    def choose_mode(self, tokens: int, ranks: Communicator) -> None:
        """Choose the fastest mode whose micro-batches fit what is free now, on the rank that has least of it.

        It is chosen once. Collective: all ranks call it.

        Args:
            tokens: Of the largest micro-batch of this rank.
            ranks: Who trains.
        """
        if self.chosen:
            return
        found = ranks.gather((tokens, free_bytes(self._device)))
        tokens = max(count for count, _ in found)
        sizes = [size for _, size in found if size is not None]
        free = min(sizes, default=None)
        needs = {mode: self.needed_bytes(mode, tokens) for mode in MODES}
        fitting = [mode for mode in MODES if free is None or needs[mode] <= free]
        self._take(fitting[0] if fitting else True)
        table = ", ".join(f"{name(mode)} {size / GIB:.1f}" for mode, size in needs.items())
        have = "what a GPU has free is not known here" if free is None else f"{free / GIB:.1f} GiB are free"
        log.info(
            "gradient_checkpointing auto takes %s: a micro-batch of %d tokens needs about (GiB) %s, and %s",
            name(self.mode),
            tokens,
            table,
            have,
        )

    def synchronize_mode(self, ranks: Communicator) -> None:
        """Where a rank had to fall back, all go on as it does. Collective."""
        if self.automatic and ranks.size > 1:
            mode = MODES[max(ranks.gather(MODES.index(self.mode)))]
            if mode != self.mode:
                self._take(mode)

    def needed_bytes(self, mode: Checkpointing, tokens: int) -> int:
        """About what an update needs on top of what stays: activations, and gradients and states that are yet to come.

        Args:
            mode: One of `MODES`.
            tokens: Of a micro-batch.
        """
        config, size = self._base.config, self._dtype.itemsize
        hidden, inner = config.hidden_size, config.intermediate_size
        head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        # Inputs and results of both norms, attention's queries, keys, values and result, and the MLP's three, as the
        # ops on a GPU keep them.
        full_finetuning = size * (4 * hidden + 2 * queries + 2 * keys + 3 * inner)
        if any(isinstance(module, Float32RMSNorm) and module.weight.requires_grad for module in self._base.modules()):
            full_finetuning += 2 * 2 * 4 * hidden  # in float32
        products = size * (hidden + queries + 2 * keys + 2 * inner)  # all but the last
        kept = {False: full_finetuning, "selective": size * hidden + products, True: size * hidden}[mode]
        working = (0 if mode is False else full_finetuning) + size * (
            4 * inner + 6 * hidden
        )  # a layer, and gradients on the way
        fixed = 2 * CHUNK_BYTES + self._weight_bytes() + self._yet_to_come()
        return int(SPARE * tokens * (config.num_hidden_layers * kept + working)) + fixed

    def _weight_bytes(self) -> int:
        """Copies of a weight that live for a product: in the activations' type, and where it trains its gradient."""
        config, size = self._base.config, self._dtype.itemsize
        largest, head = config.hidden_size * config.intermediate_size, self._base.get_output_embeddings().weight
        if not head.requires_grad:
            return size * largest
        # Gradients in the activations' type, then in float32; the layer to the vocabulary beside any other.
        return (2 * size + 4) * (largest + head.numel())

    def _yet_to_come(self) -> int:
        trained = [parameter for parameter in self._base.parameters() if parameter.requires_grad]
        gradients = sum(parameter.nbytes for parameter in trained if parameter.grad is None)
        return gradients + int(self._state_to_come * sum(parameter.numel() for parameter in trained))

    def run_with_oom_fallback(self, work: Callable[[], T], parameters: Sequence[nn.Parameter]) -> T:
        """Do `work`, which makes gradients; where it runs out of memory in "auto", once more with less kept.

        The gradients, and the random numbers that are drawn, are then those of a first attempt.

        Args:
            work: Forward and backward passes of all of an optimizer step's micro-batches: to repeat the last one alone,
                a second set of gradients would have to be held beside the sum, as large as the model where all trains.
            parameters: What it gives gradients to; before it they have none.

        Raises:
            OutOfMemoryError: There is nothing left to keep less of.
        """
        while self.automatic and self.mode is not True:
            state = self._random_state()
            lenient = torch.is_deterministic_algorithms_warn_only_enabled()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            # Outside of the except clause, so that nothing refers to what the attempt had computed.
            torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=lenient)
            for parameter in parameters:
                parameter.grad = None
            self._set_random_state(state)
            self._fall_back(reason)
        return work()

    def _fall_back(self, reason: str) -> None:
        before = self.mode
        self._take(MODES[MODES.index(before) + 1])
        warn_of_this_rank(
            log,
            "gradient_checkpointing auto goes on with %s, for %s ran out of memory: %s",
            name(self.mode),
            name(before),
            reason,
        )
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _device(self) -> torch.device:
        return self._base.device

    def _random_state(self) -> list[Tensor]:
        if not self._random:
            return []
        on_gpu = self._device.type == "cuda"
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._device)] if on_gpu else [])]

    def _set_random_state(self, state: list[Tensor]) -> None:
        if state:
            torch.set_rng_state(state[0])
        for gpu in state[1:]:
            torch.cuda.set_rng_state(gpu, self._device)

    def _apply(self) -> None:
        if self.mode is False:
            if self._applied:
                self._base.gradient_checkpointing_disable()
            return
        self._applied = True
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self._random}
        if self.mode == "selective":
            settings["context_fn"] = partial(selective_checkpoint_contexts, last_is_added=_all_products_known(self._base))
        self._base.gradient_checkpointing_enable(settings)
        self._base.disable_input_require_grads()  # reentrant checkpoints alone need it, and it costs products


def name(mode: Checkpointing) -> str:
    """As a configuration has it."""
    return str(mode).lower()


def free_bytes(device: torch.device) -> int | None:
    """What the GPU has free for tensors, once PyTorch has given back what it kept for reuse; None without one."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _all_products_known(base: nn.Module) -> bool:
    """Whether every linear of the layers is one whose product is kept: PyTorch's own is, where an adapter is on it."""
    modules = dict(base.named_modules())
    plain = [name for name, module in modules.items() if isinstance(module, nn.Linear) and ".layers." in name]
    own = [name for name in plain if ".lora_" not in name]
    return all(isinstance(modules[name.rpartition(".")[0]], LoraLinear) for name in own)
