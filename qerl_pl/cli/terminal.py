"""What a terminal shows: this package's lines, one progress bar, and of other libraries what a user can act on.

Each message that is kept away is named here with the reason; whatever is not named is shown.
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from transformers.utils.logging import set_tqdm_hook

from qerl_pl.distributed.communicator import is_first_process

LEVELS = {
    # Which requests go out, which fonts are found, that TensorFlow is absent.
    "httpx": logging.WARNING,
    "matplotlib": logging.WARNING,
    "datasets": logging.WARNING,
    "absl": logging.WARNING,
    # Seeds, devices, advertisements of other loggers, `weights_only` at every checkpoint: what concerns a user of it
    # this package's own lines say.
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
}
"""Level of other libraries' loggers, by name."""

_LATE_KERNEL = ".* during inference: .* This causes a latency spike"
LOG_MESSAGES = {
    # A kernel that is compiled when its shape first comes costs a rollout seconds, once; a server's user would wait.
    "vllm.utils.jit_monitor": _LATE_KERNEL,
    "vllm.triton_utils.jit_monitor": _LATE_KERNEL,  # its place in earlier releases
    # The engine puts the process's random states back when vLLM has started.
    "vllm.engine.arg_utils": "The global random seed is set to .* may affect the random state of the Python process",
    # 4-bit weights and 16-bit products are what was asked for.
    "vllm.model_executor.kernels.linear.nvfp4.marlin": "Your GPU does not have native support for FP4 computation",
}
"""Pattern of the messages of a logger that are left out. vLLM resets levels, not filters, when it is imported."""

WARNINGS = (
    # Prompts come from one process on purpose: they are a list in memory.
    ".*does not have many workers.*",
    "Total length of `DataLoader` across ranks is zero",  # val_size: 0 is a choice
    # The optimizer that is taken where the YAML names none, in the copy of the settings that a run keeps.
    r"\s*Unable to serialize instance <function QeRLModule\.<lambda>",
    # That of a run which goes on has its checkpoints, and a fresh run refuses another's.
    r"Checkpoint directory .* exists and is not empty",
    # Said by one library about another; nothing a user of this package can change.
    ".*isinstance.treespec, LeafSpec.*",
    ".*'set_vital' is deprecated.*",
    ".*gradient_checkpointing.*",
    # vLLM makes a process group of this process alone: metrics meet in it, and Lightning takes the run for distributed.
    r"barrier\(\): using the device under current context\. You can specify `device_id`",
    r"It is recommended to use `self\.log\('(rollouts|step)', \.\.\., sync_dist=True\)`",  # ours, equal on all ranks
)
"""Patterns of warnings."""

BARS = ("Loading weights", "Writing model shards")
"""Progress bars of transformers that take a moment, and that a log line announces."""


class StandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment: while a progress bar lives, to lines above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.setStream(sys.stderr)
        super().emit(record)


class _Without(logging.Filter):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.pattern.match(record.getMessage()) is None


def configure_terminal() -> None:
    """Set up logging, warnings and progress bars of this process for a user who watches."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[StandardError(sys.stderr)]
    )
    if not is_first_process():  # what all ranks have to say, the first one says; see `warn_of_this_rank`
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name, pattern in LOG_MESSAGES.items():
        logging.getLogger(name).addFilter(_Without(pattern))
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    set_tqdm_hook(_without_bars)


def _without_bars(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.get("desc") in BARS:
        options = {**options, "disable": True}
    return bar(*args, **options)
