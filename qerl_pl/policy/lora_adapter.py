"""The trained LoRA adapter (factors, low-precision copies, checkpoints), in a file of its own: PEFT imports slowly."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.families import family_of, noisy_norm_names
from qerl_pl.policy.adapter import load_in_place, restored_parameters
from qerl_pl.policy.delta_net import PackedDeltaNet
from qerl_pl.policy.lora import ADAPTER, FrozenLinear, LoraLinear, LoraSpec, can_fuse_lora, check_targets
from qerl_pl.policy.packed_layers import GatedMLP, PackedAttention
from qerl_pl.seeds import stream_seed


def cast_master_weights(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Low-precision copies of each group, concatenated by rows: `to(dtype)` in a few kernels forward and backward.

    The gradients of all master weights are computed once the backward pass has reached every copy.

    Args:
        groups: Master weights of one device and one data type; the members of a group differ in their rows only.
        dtype: Another data type.
    """
    return _CastMasterWeights.apply(dtype, groups, *(master for group in groups for master in group))


class _CastMasterWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, groups: Sequence[Sequence[Tensor]], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.rows = masters[0].dtype, [[len(master) for master in group] for group in groups]
        ctx.set_materialize_grads(False)
        shapes = [(sum(map(len, group)), *group[0].shape[1:]) for group in groups]
        copies = [masters[0].new_empty(shape, dtype=dtype) for shape in shapes]
        slices = [part for copy, rows in zip(copies, ctx.rows, strict=True) for part in copy.split(rows)]
        torch._foreach_copy_(slices, masters)
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slices: list[Tensor | None] = []
        for grad, rows in zip(grads, ctx.rows, strict=True):
            slices += [None] * len(rows) if grad is None else grad.split(rows)
        low = [grad for grad in slices if grad is not None]
        wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in low]
        if wide:
            torch._foreach_copy_(wide, low)
        remaining = iter(wide)
        return None, None, *(None if grad is None else next(remaining) for grad in slices)


class PeftLoraLinear(LoraLinear, LoraLayer):
    """A linear with an adapter, which PEFT builds when it wraps a model, and can disable."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int, lora_alpha: int, **kwargs: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, nn.Linear | FrozenLinear)
        return module.in_features, module.out_features


class LoraAdapter:
    """Trains low-rank factors over a frozen base, and copies of its norms. `FullWeights` has the same methods.

    PEFT's wrapping is private to this class.

    Args:
        base: The frozen causal LM; the adapter is attached to it in place.
        config: Settings of the factors, see `check_targets`; A is drawn from PyTorch's generator, B is zero.
        train_norms: Train copies of the layers' norms too; PEFT saves them with the adapter.
        base_name: Folder or hub name of the base, as the user gave it.
    """

    result = "adapter"
    """Folder of a run's result."""
    state_description = ("adapter", "model.policy.lora and train_norms")
    """Content of the state, and the configuration keys that determine it, for error messages."""
    full_finetuning = False

    def __init__(self, base: PreTrainedModel, config: LoraSpec, train_norms: bool, base_name: str) -> None:
        check_targets(base, config)
        self.config, self.base, self._family = config, base, family_of(base.config.model_type)
        peft_config = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=list(config.targets),
            use_rslora=config.use_rslora,
            modules_to_save=list(self._family.noisy_norms) if train_norms else None,
            bias="none",
            task_type="CAUSAL_LM",
        )
        peft_config._register_custom_module(dict.fromkeys((FrozenLinear, nn.Linear), PeftLoraLinear))
        # Float32 factors over a 16-bit base: AdamW steps are below the resolution of bfloat16.
        self.model = PeftModelForCausalLM(base, peft_config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
        self.model.peft_config[ADAPTER].base_model_name_or_path = base_name
        self._linears = {name: module for name, module in base.named_modules() if isinstance(module, LoraLinear)}
        blocks = PackedAttention | PackedDeltaNet | GatedMLP
        self._blocks = [module for module in base.modules() if isinstance(module, blocks)]
        self._start: list[Tensor] = []

    @property
    def has_dropout(self) -> bool:
        """Whether forward passes in training are random."""
        return self.config.dropout > 0.0

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The trained A [r, in] and B [out, r] by the linear's name in the base."""
        return {name: linear.factors() for name, linear in self._linears.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Trained norm scales [hidden] by checkpoint name."""
        norms = {name: m for name, m in self.base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
        return {f"{name}.weight": norm.modules_to_save[ADAPTER].get_parameter("weight") for name, norm in norms.items()}

    def norms(self) -> dict[str, Float32RMSNorm]:
        """The layers' norms that a forward pass uses, by module name in the base."""
        modules = dict(self.base.named_modules())
        found = {}
        for name in noisy_norm_names(modules, self._family):
            norm = modules[name]
            norm = norm.modules_to_save[ADAPTER] if isinstance(norm, ModulesToSaveWrapper) else norm
            assert isinstance(norm, Float32RMSNorm)
            found[name] = norm
        return found

    def start_from(self, start: Mapping[str, Tensor]) -> None:
        """Load a saved adapter's tensors by PEFT's names, and keep a copy as the reference policy; UserError where they
        do not fit. Norms that it lacks start as the base's."""
        own = self.state()
        norms = {name: tensor for name, tensor in own.items() if ".lora_" not in name}
        load_in_place(own, norms | dict(start), self.state_description[0], "model.policy.adapter and model.policy.path")
        self._start = [parameter.detach().clone() for parameter in self._parameters()]

    @property
    def has_start(self) -> bool:
        """Whether the reference policy is a saved adapter, which training started from; or else the base."""
        return bool(self._start)

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Inside the block the model it returns is the reference policy, without gradients if that has an adapter."""
        if not self._start:
            with self.model.disable_adapter():
                yield self.base
            return
        self._exchange_with_start()
        try:
            with torch.no_grad():
                yield self.base
        finally:
            self._exchange_with_start()

    def _exchange_with_start(self) -> None:
        """Exchange the memory of the trained parameters and of their start; nothing is copied."""
        for index, parameter in enumerate(self._parameters()):
            parameter.data, self._start[index] = self._start[index], parameter.data

    def _parameters(self) -> list[Tensor]:
        linears = (factor for linear in self._linears.values() for factor in linear.factors())
        return [*linears, *self.tensors().values()]

    @contextmanager
    def low_precision_copies(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, a single forward pass, the linears use copies of their factors in `dtype`.

        All copies, and the gradients of all master weights, are made together: the same numbers as if each linear cast
        its own, in a few kernels. Linears that `can_fuse_lora` get one concatenated A. Recomputation in the backward
        pass happens outside the block and casts the master weights again, unless the copies were saved.
        """
        groups = [block.shared_input for block in self._blocks if can_fuse_lora(block.shared_input)]
        fused = {linear for group in groups for linear in group}
        groups += [(linear,) for linear in self._linears.values() if not (linear.disable_adapters or linear in fused)]
        linears = [linear for group in groups for linear in group]
        a = [[linear.factors()[0] for linear in group] for group in groups]
        b = [[linear.factors()[1]] for linear in linears]
        if all(master.dtype == dtype for masters in (*a, *b) for master in masters):
            yield
            return
        copies = cast_master_weights(a + b, dtype)
        a_copies = [copy for copy, group in zip(copies, groups, strict=False) for _ in group]
        b_copies = copies[len(groups) :]
        try:
            for linear, a_copy, b_copy in zip(linears, a_copies, b_copies, strict=True):
                linear.low_precision_factors = a_copy, b_copy
            yield
        finally:
            for linear in linears:
                linear.low_precision_factors = None

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        """Inside the block every B is random by `seed`.

        At strength 1 it changes the output of a linear with random weights by about half of it, and with pretrained
        ones, where some activations are very large, by more.
        """
        matrices = {name: b for name, (_, b) in self.factors().items()}
        std = strength / (self.config.scaling * math.sqrt(self.config.rank))
        with restored_parameters(matrices.values()):
            with torch.no_grad():
                for name, b in matrices.items():
                    b.normal_(std=std, generator=torch.Generator(b.device).manual_seed(stream_seed(seed, name)))
            yield

    def state(self) -> dict[str, Tensor]:
        """Trained tensors by PEFT's names, detached."""
        # Not "auto", which asks the hub whether the embeddings are the base's own.
        state = get_peft_model_state_dict(self.model, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
