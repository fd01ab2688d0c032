"""What TensorBoard opens on, and how much memory a step took."""

import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

LAYOUT = {
    "Learning": {
        "reward": ["Multiline", ["reward/mean", "val/accuracy", "val/pass@1"]],
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
    },
}
"""TensorBoard's custom scalars: reward and entropy first."""


class Monitor(Callback):
    """Lays out TensorBoard's custom-scalars page and logs `memory/peak_gib`.

    The peak is the largest amount of GPU memory that PyTorch held since the step began, or, without a GPU, the
    process's largest resident size so far.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout once."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(LAYOUT)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step's peak and begin a new one."""
        pl_module.log("memory/peak_gib", _peak_gib(pl_module.device), batch_size=1)
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)


def _peak_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
