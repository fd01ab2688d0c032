"""Several processes, a device each, on Lightning's own launchers: Lightning's DDP strategy without its wrapper.

What is trained is whole on each rank, and the ranks have different numbers of micro-batches: so each accumulates its
gradient by itself, and the update adds them up once an optimizer step (`Ranks.sum`). DistributedDataParallel would
broadcast every parameter at the start, lent 4-bit weights included, and wait for all ranks in every backward pass.
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

from qerl_pl.distributed.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.distributed.failure_detector import FailureDetector
from qerl_pl.errors import UserError

TIMEOUT = timedelta(days=1)

"""Of a collective: ranks wait for the slowest rollout. That one of them is gone is noticed by `Watch`, not by this."""


class UnwrappedDDPStrategy(DDPStrategy):
    """A process a device; see this file's head."""

    def __init__(self) -> None:
        super().__init__(timeout=TIMEOUT)
        self.ranks = SINGLE_PROCESS
        """Set when the processes have found each other."""
        self.watch: FailureDetector | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = FailureDetectingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Find the other processes, and begin to watch them."""
        with _taken_port_told():
            super().setup_environment()
        if self.ranks is SINGLE_PROCESS:
            # What an engine of each rank reads; Lightning's launcher sets all but this.
            os.environ["RANK"] = str(self.global_rank)
            self.ranks = Communicator(
                self.global_rank, self.world_size, distributed.new_group(backend="gloo", timeout=TIMEOUT)
            )
            children = self._launcher.procs if isinstance(self._launcher, FailureDetectingLauncher) else []
            self.watch = FailureDetector(self.ranks, self.local_rank, children)

    def setup(self, trainer: "pl.Trainer") -> None:
        """As on one device: DDP's would broadcast the module's tensors."""
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        return model

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, which may be waiting for this one."""
        if self.watch is not None:
            self.watch.failed(exception)

    def teardown(self) -> None:
        """The run has ended on all ranks: whichever goes first, the others do not take it for dead."""
        super().teardown()
        if self.watch is not None:
            self.watch.stop(self.ranks)

    def finish(self) -> int:
        """Leave the other processes, all at once, and wait for those that this one has started; their status."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return 0 if self.watch is None else self.watch.join()


class FailureDetectingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process a device; `Watch` looks after the processes.

    Lightning's own observer kills the first process, too, with SIGKILL, when another ends: no reason is told and
    nothing is closed.
    """

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Start the other processes of this machine where nobody else has, then call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if self.cluster_environment.node_rank() == 0:
                self._hold_port()
            self._call_children_scripts()
        return function(*args, **kwargs)

    def _hold_port(self) -> None:
        """Listen where the ranks will meet before they start; the store of the process group shares this server.

        Lightning finds a free port, lets it go, and listens there later: by then another run may have it.
        """
        with _taken_port_told():
            self._meeting = TCPStore(
                self.cluster_environment.main_address,
                int(os.environ.get("MASTER_PORT", 0)),  # 0: the system chooses
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
            )
        os.environ["MASTER_PORT"] = str(self._meeting.port)


@contextmanager
def _taken_port_told() -> Iterator[None]:
    """Tell a user, instead of PyTorch, that another process has the port where rank 0 is to listen."""
    try:
        yield
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        found = f"port {os.environ['MASTER_PORT']} is" if "MASTER_PORT" in os.environ else "all are"
        raise UserError(
            f"rank 0 needs a free port on its machine, where the ranks meet; {found} taken: set MASTER_PORT to a free "
            "one, the same for all ranks"
        ) from error


def communicator_of(trainer: "pl.Trainer") -> Communicator:
    """The ranks of a trainer whose processes have found each other; before that, and with one process, `SINGLE_PROCESS`."""
    return trainer.strategy.ranks if isinstance(trainer.strategy, UnwrappedDDPStrategy) else SINGLE_PROCESS
