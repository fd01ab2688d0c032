"""Jobs of SLURM: the signal before their time limit, how many processes they have started, and their requeue."""

import logging
import os
import signal
import subprocess
import threading

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from qerl_pl.errors import UserError, sigusr1_as_sigterm
from qerl_pl.runtime.communicator import planned_ranks

log = logging.getLogger(__name__)

_REQUEUE_TIMEOUT_S = 60


def take_sigusr1() -> None:
    """Handle SIGUSR1 as SIGTERM in a job of SLURM, unless it has a handler.

    To be called before Lightning installs its own, which saves in the middle of a step.
    """
    in_job = "SLURM_JOB_ID" in os.environ or "SLURM_NTASKS" in os.environ
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_job and in_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, sigusr1_as_sigterm)


def requeue_job() -> None:
    """Have SLURM start this job again; log a warning if it does not."""
    variables = os.environ
    job = variables.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in variables:
        job = f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_TIMEOUT_S)
        reason = "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        log.warning("`%s` fails (%s): submit the job again, with --resume auto", " ".join(command), reason)


def check_world(trainer: Trainer) -> None:
    """Refuse another number of processes than the trainer has devices, where SLURM or torchrun starts them.

    Raises:
        UserError: They differ.
    """
    strategy, ranks = trainer.strategy, planned_ranks(trainer)
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    if isinstance(environment, TorchElasticEnvironment) or (environment is None and TorchElasticEnvironment.detect()):
        launcher, expected = "torchrun --nnodes {} --nproc-per-node {}", {"WORLD_SIZE": ranks}
    elif isinstance(environment, SLURMEnvironment) or (environment is None and SLURMEnvironment.detect()):
        launcher, expected = "srun --nodes {} --ntasks-per-node {}", {"SLURM_NTASKS": ranks}
        if ranks > 1:
            expected |= {"SLURM_NTASKS_PER_NODE": trainer.num_devices, "SLURM_NNODES": trainer.num_nodes}
    else:
        return
    for name, number in expected.items():
        if (given := os.environ.get(name, str(number))) != str(number):
            raise UserError(
                f"a run has one process for each device; got {name}={given} for trainer.devices {trainer.num_devices} "
                f"and trainer.num_nodes {trainer.num_nodes}; start it by "
                f"{launcher.format(trainer.num_nodes, trainer.num_devices)}, or set these keys to what was started"
            )
