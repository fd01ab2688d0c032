"""Logs TensorBoard's layout, the memory of policy, optimizer and engine, and the accuracy before training."""

import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from qerl_pl.callbacks.rollout import rollout_callback
from qerl_pl.engines.base import SharedWeights
from qerl_pl.models.memory import GIB, held_gib
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule, require_qerl_module
from qerl_pl.policy.full_finetuning import FullWeights
from qerl_pl.policy.policy import Policy

LAYOUT = {
    "Learning": {
        "reward": ["Multiline", ["reward/mean$"]],
        "held-out accuracy (greedy)": ["Multiline", ["val/(.+/)?accuracy$"]],
        "held-out pass@1 (sampled)": ["Multiline", ["val/(.+/)?pass@1$"]],
        "held-out reward (sampled)": ["Multiline", ["val/(.+/)?reward_mean$"]],
        "entropy": ["Multiline", ["policy/entropy$"]],
        "KL from the reference": ["Multiline", ["policy/kl$"]],
        "clip fraction": ["Multiline", ["policy/clip_frac_low$", "policy/clip_frac_high$"]],
        "completion length": ["Multiline", ["completions/length_mean$"]],
        "truncated completions": ["Multiline", ["completions/truncated_frac$"]],
    },
    "Sampler": {
        "difference from the trainer": ["Multiline", ["mismatch/logprob_abs_mean$"]],
        "noise": ["Multiline", ["aqn/sigma$", "aqn/measured_std$"]],
    },
    "Cost": {
        "seconds": ["Multiline", ["time/sync_s$", "time/rollout_s$", "time/reward_s$", "time/update_s$"]],
        "memory": ["Multiline", ["memory/peak_gib$", "memory/driver_gib$", "memory/base_gib$", "memory/kv_cache_gib$"]],
    },
}
"""TensorBoard's custom scalars: what is learned first. A chart has one color for each run, so few curves."""


def measure_memory(
    policy: Policy, shared: SharedWeights | None, optimizers: Iterable[Optimizer], engine: Mapping[str, float]
) -> dict[str, float]:
    """GiB that trainer and engine hold between two steps, by item; "base" counts every copy, shared weights once.

    Args:
        policy: Base and trained weights, and in full fine-tuning the reference policy.
        shared: Weights that the policy shares with the engine.
        optimizers: Optimizers of the trained weights.
        engine: `RolloutEngine.memory_gib`.
    """
    held: list[Tensor] = []
    if shared is not None:
        packed = (tensor for weight in shared.linears.values() for tensor in weight.tensors().values())
        held = [*shared.tensors.values(), *packed]
    engine_only = max(engine.get("weights", 0.0) - held_gib(held), 0.0)
    reference = policy.trained.reference_model if isinstance(policy.trained, FullWeights) else None
    for model in (policy, *([] if reference is None else [reference])):
        held += [weight for weight in (*model.parameters(), *model.buffers()) if not weight.requires_grad]
    states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    return {
        "base": held_gib(held) + engine_only,
        "adapter": held_gib(p for p in policy.parameters() if p.requires_grad) + engine.get("adapter", 0.0),
        "optimizer": held_gib(value for value in states if isinstance(value, Tensor)),
        "kv_cache": engine.get("kv_cache", 0.0),
    }


class Monitor(Callback):
    """Lays out TensorBoard's custom-scalars page, and logs the memory of each step.

    `memory/base_gib` has every copy of the base, `kv_cache_gib` is as while sampling, and `memory/peak_gib` is the peak
    of PyTorch's GPU memory since the step began, without a GPU the process's largest resident size so far. On a GPU
    `memory/activations_gib` is the peak of activations and logits in the update, and `memory/driver_gib` all memory in
    use after it. List it after the RolloutCallback, so that sampling does not count as part of the update.

    The accuracy before training, if the sanity check covers all validation prompts
    (`trainer.num_sanity_val_steps: -1`), is logged at step -1.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout once."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(LAYOUT)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the first rollout's peak."""
        require_qerl_module(pl_module, "Monitor")
        self._begin_peak(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Begin the update's peak."""
        self._begin_peak(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Log the step's memory and begin a new peak."""
        assert isinstance(pl_module, QeRLModule)
        engine, device = rollout_callback(trainer, "Monitor").engine, pl_module.device
        gib = measure_memory(pl_module.policy, pl_module.shared_weights, trainer.optimizers, engine.memory_gib())
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            gib["activations"] = _peak_gib(device) - self._held - _gradient_gib(pl_module)
            gib["driver"] = (total - free) / GIB
        gib["peak"] = max(_peak_gib(device), self._sampling_peak)
        pl_module.log_dict({f"memory/{name}_gib": size for name, size in gib.items()}, batch_size=1)
        self._begin_peak(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracy before training, which Lightning drops as a sanity check."""
        module = require_qerl_module(pl_module, "Monitor")
        if trainer.sanity_checking and (metrics := module.validation_metrics()):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=BEFORE_TRAINING)

    def _begin_peak(self, module: LightningModule) -> None:
        self._sampling_peak = _peak_gib(module.device)
        if module.device.type == "cuda":
            self._held = torch.cuda.memory_allocated(module.device) / GIB - _gradient_gib(module)
            torch.cuda.reset_peak_memory_stats(module.device)


def _gradient_gib(module: nn.Module) -> float:
    return held_gib(p.grad for p in module.parameters() if p.grad is not None)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / GIB if sys.platform == "darwin" else peak / 2**20
