"""Logs TensorBoard's layout, the memory of policy, optimizer and engine, and the accuracy before training."""

import logging
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from qerl_pl.callbacks.rollout import rollout_callback
from qerl_pl.engines.base import SharedWeights
from qerl_pl.models.memory import GIB, held_gib
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule
from qerl_pl.policy.full_finetuning import FullWeights

LOGGED = ("base", "adapter", "optimizer", "kv_cache")
LOGGED_ON_GPU = ("activations", "driver")
"""Items of the report that are logged each step as `memory/<item>_gib`."""


def measure_memory(
    policy: nn.Module,
    shared: SharedWeights | None,
    optimizers: Iterable[torch.optim.Optimizer],
    engine: Mapping[str, float],
    reference: nn.Module | None = None,
) -> dict[str, float]:
    """GiB that trainer and engine hold between two steps, by item; "base" counts every copy, shared weights once.

    Args:
        policy: Base and trained weights.
        shared: Weights that the policy shares with the engine.
        optimizers: Of the trained weights.
        engine: `RolloutEngine.memory_gib`.
        reference: Second model of full fine-tuning, the reference policy; None without one.
    """
    shared_tensors: list[Tensor] = []
    if shared is not None:
        shared_tensors = [*shared.tensors.values()]
        shared_tensors += [tensor for weight in shared.linears.values() for tensor in weight.tensors().values()]
    frozen = [p for p in policy.parameters() if not p.requires_grad] + list(policy.buffers())
    frozen += [] if reference is None else [*reference.parameters(), *reference.buffers()]
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    engine_only = max(engine.get("weights", 0.0) - held_gib(shared_tensors), 0.0)
    return {
        "base": held_gib([*frozen, *shared_tensors]) + engine_only,
        "adapter": held_gib(p for p in policy.parameters() if p.requires_grad) + engine.get("adapter", 0.0),
        "gradients": gradient_gib(policy),
        "optimizer": held_gib(value for state in states for value in state.values() if isinstance(value, Tensor)),
        "kv_cache": engine.get("kv_cache", 0.0),
        "released": engine.get("released", 0.0),  # of the cache, by a sleeping engine
    }


def memory_table(gib: Mapping[str, float]) -> str:
    """A line for each purpose; on a GPU also its total use while the engine samples."""
    rows = {
        "frozen weights": gib["base"],
        "trained weights and optimizer": gib["adapter"] + gib["gradients"] + gib["optimizer"],
        "key/value cache": gib["kv_cache"],
    }
    if "driver" in gib:
        rows["activations (peak)"] = gib["activations"]
        rows[f"in use, of {gib['device']:.1f} GiB"] = gib["driver"] + gib["released"]
    return "\n".join(f"  {name:<33}{size:9.3f} GiB" for name, size in rows.items())


def gradient_gib(policy: nn.Module) -> float:
    """GiB of the gradients held now."""
    return held_gib(p.grad for p in policy.parameters() if p.grad is not None)


log = logging.getLogger(__name__)

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


class Monitor(Callback):
    """Lays out TensorBoard's custom-scalars page and logs the memory.

    Each step logs what is held between steps (`memory/base_gib` with every copy of the base, `adapter_gib`,
    `optimizer_gib`, `kv_cache_gib` as while sampling) and `memory/peak_gib`, the peak of PyTorch's GPU memory since the
    step began (without a GPU the process's largest resident size so far). On a GPU also `memory/activations_gib`, the
    peak of activations and logits in the update, and `memory/driver_gib`, all memory of the GPU in use after the
    update. The log shows a table before the first rollout and after the first update. List it after the
    RolloutCallback, so that sampling does not count as part of the update.

    The accuracy before training, if the sanity check covers all validation prompts
    (`trainer.num_sanity_val_steps: -1`), is logged at step -1.
    """

    def __init__(self) -> None:
        self._held = 0.0
        self._sampling_peak = 0.0
        self._shown = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout once."""
        self._shown = False
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(LAYOUT)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the memory before the first rollout."""
        assert isinstance(pl_module, QeRLModule)
        if pl_module.device.type == "cuda":
            self._begin_peak(pl_module)
        log.info("memory before the first rollout:\n%s", memory_table(self._measure(trainer, pl_module)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the update's peak."""
        device = pl_module.device
        if device.type == "cuda":
            self._sampling_peak = torch.cuda.max_memory_allocated(device) / GIB
            self._begin_peak(pl_module)

    def _begin_peak(self, module: LightningModule) -> None:
        self._held = torch.cuda.memory_allocated(module.device) / GIB - gradient_gib(module)
        torch.cuda.reset_peak_memory_stats(module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step's memory and begin a new peak."""
        assert isinstance(pl_module, QeRLModule)
        gib = self._measure(trainer, pl_module)
        device = pl_module.device
        metrics = {f"memory/{name}_gib": gib[name] for name in LOGGED + LOGGED_ON_GPU if name in gib}
        metrics["memory/peak_gib"] = max(_peak_gib(device), self._sampling_peak)
        pl_module.log_dict(metrics, batch_size=1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if not self._shown:
            log.info("memory after the first update:\n%s", memory_table(gib))
            self._shown = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracy before training, which Lightning drops as a sanity check."""
        if trainer.sanity_checking and trainer.num_sanity_val_batches == trainer.num_val_batches:
            assert isinstance(pl_module, QeRLModule)
            for logger in trainer.loggers:
                logger.log_metrics(pl_module.validation_metrics(), step=BEFORE_TRAINING)

    def _measure(self, trainer: Trainer, module: QeRLModule) -> dict[str, float]:
        engine = rollout_callback(trainer, "Monitor").engine.memory_gib()
        trained = module.policy.trained
        reference = trained.reference_model if isinstance(trained, FullWeights) else None
        gib = measure_memory(module.policy, module.shared_weights, trainer.optimizers, engine, reference)
        if module.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(module.device)
            held = self._held + gib["gradients"]  # during the update
            activations = torch.cuda.max_memory_allocated(module.device) / GIB - held
            gib |= {"activations": activations, "driver": (total - free) / GIB, "device": total / GIB}
        return gib


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / GIB if sys.platform == "darwin" else peak / 2**20
