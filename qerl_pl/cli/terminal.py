"""Logging, warnings and progress bars in a terminal, without other libraries' messages that call for no action."""

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from transformers.utils.logging import set_tqdm_hook

from qerl_pl.runtime.communicator import is_first_process

LEVELS = {
    name: logging.WARNING
    for name in ("httpx", "httpx2", "matplotlib", "datasets", "absl", "lightning.pytorch", "lightning.fabric")
} | {"lightning.pytorch.profilers": logging.INFO}
"""Level of other libraries' loggers, by name: requests, fonts, seeds, devices, advertisements."""

_LATE_KERNEL = ".* during inference: .* This causes a latency spike"
LOG_MESSAGES = {
    # Compiling a kernel at the first use of a shape costs a rollout seconds, once.
    "vllm.utils.jit_monitor": _LATE_KERNEL,
    "vllm.triton_utils.jit_monitor": _LATE_KERNEL,  # its name in earlier releases
    # The engine restores the process's random states when vLLM has started.
    "vllm.engine.arg_utils": "The global random seed is set to .* may affect the random state of the Python process",
    # PEFT imports it; nothing here uses that kernel.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # 4-bit weights with 16-bit products are intended.
    "vllm.model_executor.kernels.linear.nvfp4.marlin": "Your GPU does not have native support for FP4 computation",
}
"""Pattern of the hidden messages of a logger. Importing vLLM resets levels, not filters."""

WARNINGS = (
    ".*does not have many workers.*",  # prompts are a list in memory
    r"Checkpoint directory .* exists and is not empty",  # of a resumed run; a fresh run refuses another's
    # An epoch that ended before its first validation; after one, a metric that is not there is an error.
    r"`ModelCheckpoint\(monitor=.* could not find the monitored key in the returned metrics",
    # Deprecations between other libraries.
    ".*isinstance.treespec, LeafSpec.*",
    ".*'set_vital' is deprecated.*",
    ".*gradient_checkpointing.*",
    # vLLM makes a process group of this process alone, so that Lightning takes the run for distributed.
    r"barrier\(\): using the device under current context\. You can specify `device_id`",
    r"It is recommended to use `self\.log\('(rollouts|step)', \.\.\., sync_dist=True\)`",  # ours, equal on all ranks
)
"""Patterns of the hidden warnings."""

BARS = ("Loading weights", "Writing model shards")
"""Hidden progress bars of transformers; a log line announces them."""


class StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, which a progress bar replaces to have lines printed above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self.setStream(sys.stderr)
        super().emit(record)


def configure_terminal() -> None:
    """Set up logging, warnings and progress bars of this process."""
    logging.basicConfig(
        level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", handlers=[StandardError(sys.stderr)]
    )
    if not is_first_process():  # the first rank reports for all; see `warn_of_this_rank`
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for name, pattern in LOG_MESSAGES.items():
        logging.getLogger(name).addFilter(_hides(pattern))
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    set_tqdm_hook(_without_bars)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale without UTF-8 lacks the table's σ
        sys.stdout.reconfigure(errors="replace")


def _hides(pattern: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: re.match(pattern, record.getMessage()) is None


def _without_bars(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.get("desc") in BARS:
        options = {**options, "disable": True}
    return bar(*args, **options)
