"""What TensorBoard opens on, and how much memory a step took."""

import logging
import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from qerl_pl.callbacks.memory_report import MemoryReport, device_memory, gradient_gib, measure_memory
from qerl_pl.callbacks.rollout import rollout_callback
from qerl_pl.engines.capacity import GIB
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule

log = logging.getLogger(__name__)

LAYOUT = {
    "Learning": {
        "reward": ["Multiline", ["reward/mean", "val/(.+/)?accuracy", "val/(.+/)?pass@1"]],
        "entropy": ["Multiline", ["policy/entropy"]],
    },
    "Policy": {
        "distance": ["Multiline", ["policy/kl", "mismatch/logprob_abs_mean"]],
        "clipping": ["Multiline", ["policy/clip_frac_low", "policy/clip_frac_high"]],
        "noise": ["Multiline", ["aqn/sigma", "aqn/measured_std"]],
    },
    "Cost": {
        "seconds": ["Multiline", ["time/sync_s", "time/rollout_s", "time/reward_s", "time/update_s"]],
        "completions": ["Multiline", ["completions/length_mean", "completions/truncated_frac"]],
        "memory": ["Multiline", ["memory/peak_gib", "memory/driver_gib", "memory/base_gib", "memory/kv_cache_gib"]],
    },
}
"""TensorBoard's custom scalars: reward and entropy first."""


class Monitor(Callback):
    """Lays out TensorBoard's custom-scalars page and logs where the memory goes.

    Each step logs what stays between steps (`memory/base_gib` with every copy of the base, `adapter_gib`,
    `optimizer_gib`, `kv_cache_gib` as while sampling), `memory/peak_gib`, the largest amount of GPU memory that PyTorch
    held since the step began (without a GPU the process's largest resident size so far), and on a GPU
    `memory/activations_gib`, what the update needed on top of what stays, logits included,
    `memory/graphs_and_cached_gib`, what PyTorch has taken beyond its tensors, and `memory/driver_gib`, the whole GPU's
    memory in use after the update. The log shows a table of all before the first rollout and after the first update.
    List it after the RolloutCallback, so that sampling does not count as part of the update.

    The accuracy before training, where the check before the first step covers all validation prompts
    (`trainer.num_sanity_val_steps: -1`), is logged at step -1.
    """

    def __init__(self) -> None:
        self._held = 0.0
        self._sampling_peak = 0.0
        self._shown = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout once."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(LAYOUT)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is held before anything was computed."""
        assert isinstance(pl_module, QeRLModule)
        if pl_module.device.type == "cuda":
            self._begin_peak(pl_module)
        log.info("memory before the first rollout:\n%s", self._measure(trainer, pl_module).table())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Tell the update's peak from the sampler's."""
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
        report = self._measure(trainer, pl_module)
        device = pl_module.device
        peak = max(_peak_gib(device), self._sampling_peak)
        pl_module.log_dict(report.metrics() | {"memory/peak_gib": peak}, batch_size=1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if not self._shown:
            log.info("memory after the first update:\n%s", report.table())
            self._shown = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracy before training, which Lightning takes for a check of the loop and drops."""
        if trainer.sanity_checking and trainer.num_sanity_val_batches == trainer.num_val_batches:
            measured = {tag: float(value) for tag, value in trainer.callback_metrics.items() if tag.startswith("val/")}
            for logger in trainer.loggers:
                logger.log_metrics(measured, step=BEFORE_TRAINING)

    def _measure(self, trainer: Trainer, module: QeRLModule) -> MemoryReport:
        engine = rollout_callback(trainer, "Monitor").engine.memory_gib()
        on_gpu = module.device.type == "cuda"
        gpu = device_memory(module.device, self._held + gradient_gib(module.policy)) if on_gpu else None
        lent = None if module.hand_over is None else module.hand_over.lent
        return measure_memory(module.policy, lent, trainer.optimizers, engine, gpu)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
