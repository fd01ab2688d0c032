"""DDP without DistributedDataParallel: one process per device, on Lightning's launchers.

Each rank holds all trained weights and accumulates gradients over its own number of micro-batches; the update
all-reduces them once an optimizer step (`Communicator.all_reduce`). DistributedDataParallel would broadcast every
parameter at the start, shared 4-bit weights included, and synchronise the ranks in every backward pass.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed, nn
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from qerl_pl.errors import UserError
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.runtime.failure_detector import FailureDetector

TIMEOUT = timedelta(days=1)
"""Timeout of collectives: ranks wait for the slowest rollout. `FailureDetector` notices lost ranks long before."""


class UnwrappedDDPStrategy(DDPStrategy):
    """Lightning's DDP strategy without its wrapper, with a failure detector."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)
        self.communicator = SINGLE_PROCESS
        """All ranks, once the process group is initialized."""
        self.failure_detector: FailureDetector | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = FailureDetectingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Initialize the process group and start the failure detector."""
        with _port_errors():
            super().setup_environment()
        if self.communicator is SINGLE_PROCESS:
            # Read by each rank's engine and workers; Lightning's launcher sets the other variables only.
            os.environ |= {"RANK": str(self.global_rank), "LOCAL_WORLD_SIZE": str(self.num_processes)}
            self.communicator = Communicator(
                self.global_rank, self.world_size, distributed.new_group(backend="gloo", timeout=TIMEOUT)
            )
        if self.failure_detector is None or self.failure_detector.ended:  # by an earlier stage
            children = self._launcher.procs if isinstance(self._launcher, FailureDetectingLauncher) else []
            self.failure_detector = FailureDetector(self.communicator, self.local_rank, children)

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
            self.failure_detector.stop(self.communicator)

    def finish(self) -> int:
        """Destroy the process group and wait for the launched processes; their exit status."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return 0 if self.failure_detector is None else self.failure_detector.join()


class FailureDetectingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of a process per device, without its observer: `FailureDetector` observes the processes.

    Lightning's observer kills the first process, too, with SIGKILL, when another ends: no reason is reported and no
    file is closed.
    """

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Start the other processes of this machine unless a cluster has started them, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if self.cluster_environment.node_rank() == 0:
                self._hold_port()
            self._call_children_scripts()
        return function(*args, **kwargs)

    def _hold_port(self) -> None:
        """Bind the rendezvous port before the ranks start; the process group's store shares this server.

        Lightning looks up a free port, closes it, and listens there later: another run may take it meanwhile.
        """
        with _port_errors():
            self._rendezvous = TCPStore(
                self.cluster_environment.main_address,
                int(os.environ.get("MASTER_PORT", 0)),  # 0: the system chooses
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
            )
        os.environ["MASTER_PORT"] = str(self._rendezvous.port)


@contextmanager
def _port_errors() -> Iterator[None]:
    """Turn PyTorch's error of a taken rendezvous port into a UserError."""
    try:
        yield
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = f"port {os.environ['MASTER_PORT']} is" if "MASTER_PORT" in os.environ else "all are"
        raise UserError(
            f"rank 0 needs a free port on its machine, where the ranks meet; {port} taken: set MASTER_PORT to a free "
            "port, the same for all ranks"
        ) from error


def communicator_of(trainer: "pl.Trainer") -> Communicator:
    """The communicator of a trainer's process group; `SINGLE_PROCESS` without or before one."""
    strategy = trainer.strategy
    return strategy.communicator if isinstance(strategy, UnwrappedDDPStrategy) else SINGLE_PROCESS
