"""DDP without DistributedDataParallel: one process per device, on Lightning's launchers.

Each rank holds all trained weights and accumulates gradients over its own number of micro-batches; the update
all-reduces them once an optimizer step (`Communicator.all_reduce`). DistributedDataParallel would broadcast every
parameter at the start, shared 4-bit weights included, and synchronise the ranks in every backward pass.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed, nn

from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.runtime.failure_detector import HEARTBEAT_TIMEOUT_S, FailureDetector
from qerl_pl.runtime.fork_server import signal_at_end_of_parent

TIMEOUT = timedelta(days=1)
"""Timeout of collectives: ranks wait for the slowest rollout. `FailureDetector` notices lost ranks long before."""
_LAUNCHER = "QERL_LAUNCHER_PID"


class UnwrappedDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy without its wrapper, with a failure detector."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)
        self.communicator = SINGLE_PROCESS
        """All ranks, once the process group is initialized."""
        self.failure_detector: FailureDetector | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = self._own_launcher = UnobservedLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def setup_environment(self) -> None:
        """Initialize the process group and start the failure detector."""
        signal_at_end_of_launcher(signal.SIGKILL)  # PyTorch waits a day for the other ranks
        super().setup_environment()
        if self.communicator is SINGLE_PROCESS:
            # Read by each rank's engine and workers; Lightning's launcher sets the other variables only.
            os.environ |= {"RANK": str(self.global_rank), "LOCAL_WORLD_SIZE": str(self.num_processes)}
            self.communicator = Communicator(
                self.global_rank, self.world_size, distributed.new_group(backend="gloo", timeout=TIMEOUT)
            )
        if self.failure_detector is None:
            self.failure_detector = FailureDetector(self.communicator, self.local_rank, self._own_launcher.procs)
        signal_at_end_of_launcher(0)
        self._own_launcher.have_met.set()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Set up as on a single device: DDP's setup would broadcast the module's tensors."""
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def on_exception(self, exception: BaseException) -> None:
        """Report the failure to the other ranks, which may wait in a collective."""
        if self.failure_detector is not None:
            self.failure_detector.failed(exception)

    def teardown(self) -> None:
        """End failure detection on all ranks together."""
        super().teardown()
        if self.failure_detector is not None:
            self.failure_detector.stop()
            self.failure_detector = None

    def finish(self) -> int:
        """Destroy the process group and wait for the launched processes; the first exit status that is not 0."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for child in self._own_launcher.procs:
            try:
                child.wait(HEARTBEAT_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # done, but hanging in a driver
                child.kill()
        return next((status for child in self._own_launcher.procs if (status := child.wait())), 0)


class UnobservedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of a process per device, without its observer: `FailureDetector` observes the processes.

    Lightning's observer kills the first process, too, with SIGKILL, when another ends: no reason is reported and no
    file is closed.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.have_met = threading.Event()

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Start the other processes of this machine unless a cluster has started them, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())
            self._call_children_scripts()
            threading.Thread(target=self._observe_start, daemon=True).start()
        return function(*args, **kwargs)

    def _observe_start(self) -> None:
        """End the run if a process ends before all ranks have met: PyTorch waits a day for it."""
        first = self.cluster_environment.node_rank() * self.num_processes
        while not self.have_met.wait(1.0):
            for rank, child in enumerate(self.procs, start=first + 1):
                if child.poll() is not None:
                    ended = f"its process ended with status {child.returncode} at the start; run the command again"
                    print(f"qerl: rank {rank}: {ended}", file=sys.stderr)
                    for process in self.procs:
                        process.kill()
                    os._exit(max(child.returncode, 1))


def signal_at_end_of_launcher(number: int) -> None:
    """Have the kernel send this process a signal, 0 for none, when the process that launched it ends."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher not in (None, str(os.getpid())):
        signal_at_end_of_parent(number)
        if number and launcher != str(os.getppid()):  # it has ended
            os._exit(1)


def communicator_of(trainer: "pl.Trainer") -> Communicator:
    """The communicator of a trainer's process group; `SINGLE_PROCESS` without or before one."""
    strategy = trainer.strategy
    return strategy.communicator if isinstance(strategy, UnwrappedDDPStrategy) else SINGLE_PROCESS
