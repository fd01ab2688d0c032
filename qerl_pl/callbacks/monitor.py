"""Where a run's memory goes: the sizes of what policy, optimizer and engine hold."""

import logging
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from qerl_pl.callbacks.rollout import RolloutCallback
from qerl_pl.engines.base import SharedWeights
from qerl_pl.engines.capacity import GIB, held_gib
from qerl_pl.modules.qerl import BEFORE_TRAINING, QeRLModule


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory after an update, in GiB."""

    activations: float
    """Most that the update needed on top of what stays: activations and logits."""
    allocated: float
    """PyTorch's tensors, those that a sleeping engine has unmapped counted in."""
    reserved: float
    """What PyTorch's allocator has taken for tensors, counted alike."""
    driver: float
    """In use on the whole GPU, by the driver's count."""

    @property
    def spare(self) -> float:
        """Taken by PyTorch beyond all that: pools of CUDA graphs, and blocks kept for reuse."""
        return self.reserved - self.allocated - self.activations


@dataclass(frozen=True)
class MemoryReport:
    """Memory by what holds it, in GiB."""

    base_own: float
    """Frozen weights of the trainer's own."""
    base_lent: float
    """Weights that trainer and engine share."""
    base_engine: float
    """Weights that only the engine uses: a second copy of the base where it lends none."""
    adapter: float
    """Trained parameters, and the engine's copy of the adapter where the engine counts it apart."""
    gradients: float
    optimizer: float
    """The optimizer's state."""
    kv_cache: float
    """The engine's key/value cache while it samples."""
    released: float = 0.0
    """Part of `kv_cache` that a sleeping engine has given back."""
    device: DeviceMemory | None = None
    """Without a GPU nothing."""

    def metrics(self) -> dict[str, float]:
        """What is logged each step, by tag."""
        metrics = {
            "memory/base_gib": self.base_own + self.base_lent + self.base_engine,
            "memory/adapter_gib": self.adapter,
            "memory/optimizer_gib": self.optimizer,
            "memory/kv_cache_gib": self.kv_cache,
        }
        if self.device is None:
            return metrics
        return metrics | {
            "memory/activations_gib": self.device.activations,
            "memory/graphs_and_cached_gib": self.device.spare,
            "memory/driver_gib": self.device.driver,
        }

    def table(self) -> str:
        """One line an item; with a GPU the items add up to the total."""
        rows = {
            "base, the trainer's own": self.base_own,
            "base, lent by the engine": self.base_lent,
            "base, the engine's alone": self.base_engine,
            "adapter": self.adapter,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "key/value cache": self.kv_cache,
        }
        if self.device is not None:
            device, known = self.device, sum(rows.values())
            rows["other tensors"] = device.allocated - known
            rows["activations and logits"] = device.activations
            rows["CUDA graphs, cached blocks"] = device.spare
            rows["CUDA context, libraries"] = device.driver - device.reserved + self.released
            rows["total with the cache mapped"] = device.driver + self.released
        return "\n".join(f"  {name:<33}{size:9.3f} GiB" for name, size in rows.items())


def measure_memory(
    policy: nn.Module,
    borrowed: SharedWeights | None,
    optimizers: Iterable[torch.optim.Optimizer],
    engine: Mapping[str, float],
    device: DeviceMemory | None = None,
) -> MemoryReport:
    """Sizes of everything that is held between two steps.

    Args:
        policy: Base and adapter.
        lent: What the policy has borrowed.
        optimizers: Of the adapter.
        engine: `RolloutEngine.memory_gib`.
        device: Where there is a GPU.
    """
    shared: list[Tensor] = []
    if borrowed is not None:
        shared += borrowed.tensors.values()
        for weight in borrowed.linears.values():
            shared += weight.tensors().values()
    addresses = {tensor.data_ptr() for tensor in shared}
    frozen = [p for p in policy.parameters() if not p.requires_grad] + list(policy.buffers())
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    base_lent = held_gib(shared)
    return MemoryReport(
        base_own=held_gib(tensor for tensor in frozen if tensor.data_ptr() not in addresses),
        base_lent=base_lent,
        base_engine=max(engine.get("weights", 0.0) - base_lent, 0.0),
        adapter=held_gib(p for p in policy.parameters() if p.requires_grad) + engine.get("adapter", 0.0),
        gradients=gradient_gib(policy),
        optimizer=held_gib(value for state in states for value in state.values() if isinstance(value, Tensor)),
        kv_cache=engine.get("kv_cache", 0.0),
        released=engine.get("released", 0.0),
        device=device,
    )


def gradient_gib(policy: nn.Module) -> float:
    """GiB of the gradients that are held now."""
    return held_gib(p.grad for p in policy.parameters() if p.grad is not None)


def device_memory(device: torch.device, held: float) -> DeviceMemory:
    """A GPU's memory now.

    Args:
        device: The GPU.
        held: GiB that PyTorch's tensors had during all of the update.
    """
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        activations=torch.cuda.max_memory_allocated(device) / GIB - held,
        allocated=torch.cuda.memory_allocated(device) / GIB,
        reserved=torch.cuda.memory_reserved(device) / GIB,
        driver=(total - free) / GIB,
    )


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
"""TensorBoard's custom scalars."""


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
        callbacks = (callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback))  # type: ignore[attr-defined]
        engine = next(callbacks).engine.memory_gib()
        on_gpu = module.device.type == "cuda"
        gpu = device_memory(module.device, self._held + gradient_gib(module.policy)) if on_gpu else None
        return measure_memory(module.policy, module.shared_weights, trainer.optimizers, engine, gpu)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
