"""A small training run for tests: seconds on one core, with everything a real run has."""

import multiprocessing
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file, save_file
from tiny_run import quiet_trainer
from torch import Tensor

from qerl_pl.callbacks import AdaptiveQuantizationNoise, RolloutCallback
from qerl_pl.datamodules import ArithmeticDataModule, PromptDataModule
from qerl_pl.engines import TransformersEngine
from qerl_pl.modules import QeRLModule
from qerl_pl.types import SamplingConfig


def configuration(base: Path, run: Path, summary: bool = True) -> dict[str, Any]:
    """Eight rollouts over two epochs, two updates each, dropout and noise on; a checkpoint every third rollout.

    The summary, with its plot, takes a third of the time of such a run.
    """
    rollout = {
        "group_size": 2,
        "sampling": {"max_tokens": 6},
        "rewards": [
            {"class_path": "qerl_pl.rewards.GSM8KAnswer"},
            {"class_path": "fit_helpers.Vowels", "init_args": {"weight": 0.5}},
        ],
    }
    return {
        "seed_everything": 3,
        "model": {
            "policy": {
                "path": str(base),
                "dtype": "float32",
                "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1},
                "train_norms": True,
            },
            "objective": {"class_path": "qerl_pl.algorithm.GRPO", "init_args": {"beta": 0.04}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            "update_epochs": 2,
            "minibatches": 2,
            "micro_batch_tokens": 200,
        },
        "data": {
            "class_path": "qerl_pl.datamodules.ArithmeticDataModule",
            "init_args": {"train_size": 9, "batch_size": 2, "val_size": 3, "max_prompt_tokens": 96, "seed": 0},
        },
        "trainer": {
            "default_root_dir": str(run),
            "accelerator": "cpu",
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "callbacks": [
                {"class_path": "qerl_pl.callbacks.RolloutCallback", "init_args": rollout},
                {"class_path": "qerl_pl.callbacks.AdaptiveQuantizationNoise", "init_args": {"stages": 4}},
                {"class_path": "qerl_pl.callbacks.ResumeCheckpoint", "init_args": {"every_n_rollouts": 3}},
                {"class_path": "qerl_pl.callbacks.Monitor"},
                {"class_path": "qerl_pl.callbacks.CompletionLog", "init_args": {"jsonl": True}},
                *([{"class_path": "qerl_pl.callbacks.RunSummary"}] * summary),
            ],
        },
    }


KEYS = {
    "RolloutCallback": "rollout",
    "AdaptiveQuantizationNoise": "noise",
    "ModelCheckpoint": "best",
    "ResumeCheckpoint": "checkpoint",
    "Monitor": "monitor",
    "CompletionLog": "completions",
    "RunSummary": "summary",
}


def with_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """The same run with its callbacks under top-level keys, as the files in configs/ have them."""
    trainer = dict(settings["trainer"])
    listed = {KEYS[one["class_path"].rpartition(".")[2]]: one.get("init_args", {}) for one in trainer.pop("callbacks")}
    listed["rollout"] |= {"engine": "TransformersEngine"}
    return settings | {"trainer": trainer} | dict.fromkeys(KEYS.values()) | listed


class Vowels:
    """A user's own reward, dense enough that every group has a spread of rewards, with a part by Python's generator.

    Args:
        weight: Its weight.
    """

    name = "vowels"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, samples: Any) -> list[float]:
        vowels = [sum(letter in "aeiou" for letter in sample.completion) for sample in samples]
        return [count / 10 + random.random() / 100 for count in vowels]


def _child(words: list[str], prepare: Callable[[], None] | None, errors: Path) -> None:
    output = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from qerl_pl.cli.main import main

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    status = main(words)
    os._exit(status)


def processes() -> multiprocessing.context.ForkServerContext:
    """Where processes come from that import the package once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server finds what it imports by this alone
        forkserver.ensure_running()
    return context


def command(words: list[str], errors: Path, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run `qerl` in a process of its own.

    Args:
        words: The command line.
        errors: File for what is printed.
        prepare: Runs in that process first; may arrange for its death.

    Returns:
        (exit status, negative for a signal; everything that was printed).
    """
    process = processes().Process(target=_child, args=(words, prepare, errors))
    process.start()
    return _ended(process, errors), errors.read_text()


def _ended(process: multiprocessing.process.BaseProcess, errors: Path) -> int:
    process.join(timeout=800)  # pytest ends what hangs for longer
    alive = process.is_alive()
    if alive:
        process.kill()
    assert not alive, errors.read_text()
    assert process.exitcode is not None
    return process.exitcode


def fit(settings: dict[str, Any], *extra: str, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run `qerl fit` by `command`.

    Args:
        settings: The whole configuration.
        extra: More arguments.
        prepare: As there.
    """
    config = config_file(settings)
    return command(["fit", "-c", str(config), *extra], config.with_suffix(".log"), prepare)


def fit_here(settings: dict[str, Any], *extra: str) -> int:
    """Run `qerl fit` in this process, which is fast: its exit status."""
    from qerl_pl.cli.main import main

    return main(["fit", "-c", str(config_file(settings)), *extra])


def fit_on_ranks(
    settings: dict[str, Any], *extra: str, prepare: Callable[[], None] | None = None
) -> tuple[list[int], str]:
    """Run `qerl fit` in as many processes as `trainer.devices` says, each told of the others as torchrun would.

    Args:
        settings: The whole configuration.
        extra: More arguments.
        prepare: As `command` has it, on each rank.

    Returns:
        (exit status of each rank; everything that was printed).
    """
    config, size, port = config_file(settings), settings["trainer"]["devices"], free_port()
    words, started = ["fit", "-c", str(config), *extra], []
    for rank in range(size):
        places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        job = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(start(words, config.with_suffix(f".rank{rank}.log"), places | job, prepare))
    return ended(started)


Started = list[tuple[multiprocessing.process.BaseProcess, Path]]
"""Processes, and the file that has what each prints."""


def start(
    words: list[str], errors: Path, environment: dict[str, Any], prepare: Callable[[], None] | None = None
) -> tuple[multiprocessing.process.BaseProcess, Path]:
    """Start `qerl` in a process of its own, with environment variables."""
    process = processes().Process(target=_child, args=(words, partial(_become, environment, prepare), errors))
    process.start()
    return process, errors


def ended(started: Started) -> tuple[list[int], str]:
    """Wait for processes: (exit status of each; everything that was printed)."""
    statuses = [_ended(process, errors) for process, errors in started]
    return statuses, "".join(errors.read_text() for _, errors in started)


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = iter(random.SystemRandom().sample(range(20_000 + _WORKER, 32_768, 64), 199))


def adapter(run: Path) -> dict[str, Tensor]:
    """The final adapter of a run's folder."""
    return load_file(run / "adapter" / "adapter_model.safetensors")


def free_port() -> int:
    """A TCP port that nobody listens to and that no other test gets.

    It is below the ports that a system gives to connections and to listeners that ask for any (Linux: from 32768 on):
    between the choice of such a port and its use, one of many starting processes may get it.
    """
    for port in _PORTS:
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port is left between 20000 and 32768")


def _become(environment: dict[str, Any], prepare: Callable[[], None] | None) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    if prepare is not None:
        prepare()


def config_file(settings: dict[str, Any]) -> Path:
    """The configuration as a file beside the run's folder."""
    run = Path(settings["trainer"]["default_root_dir"])
    run.parent.mkdir(parents=True, exist_ok=True)
    config = run.parent / f"{run.name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    return config


def train(
    base: Path,
    run: Path,
    engine: TransformersEngine,
    dtype: str = "float32",
    lr: float = 1e-5,
    rewards: Sequence[Any] = (),
    resample_rounds: int = 0,
    watch: Callback | None = None,
    beta: float = 0.04,
    data: PromptDataModule | None = None,
    **model: Any,
) -> QeRLModule:
    """Four rollouts and a validation by Python, without the command line; `model` holds more of the module's settings.

    The trained module comes back.
    """
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(QeRLModule, "model")
    config = {"policy": {"path": str(base), "dtype": dtype, "lora": {"rank": 4}, "train_norms": True}}
    config["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr}}
    config["objective"] = {"class_path": "qerl_pl.algorithm.GRPO", "init_args": {"beta": beta}}
    settings = config | {"warmup_ratio": 0.0} | model
    module: QeRLModule = parser.instantiate_classes(parser.parse_object({"model": settings})).model
    sampling = SamplingConfig(max_tokens=4)
    scores = [*rewards] or [Vowels()]
    rollout = RolloutCallback(scores, engine, group_size=2, sampling=sampling, resample_rounds=resample_rounds)
    callbacks = [rollout, AdaptiveQuantizationNoise(stages=4), *([watch] if watch else [])]
    trainer = quiet_trainer(run, *callbacks, limit_train_batches=4, enable_checkpointing=False)
    size = 40 if resample_rounds else 8
    trainer.fit(module, datamodule=data or ArithmeticDataModule(train_size=size, batch_size=2, val_size=2))
    return module


class EvenVowels:
    """Right where the number of vowels is even: some groups are all right, some all wrong, most are mixed."""

    name = "even"
    weight = 1.0

    def __call__(self, samples: Any) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in sample.completion) % 2 == 0) for sample in samples]


class Letters:
    """Share of letters: dense, and without random numbers."""

    name = "letters"
    weight = 0.5

    def __call__(self, samples: Any) -> list[float]:
        return [sum(letter.isalpha() for letter in sample.completion) / 40 for sample in samples]


class FailsOnRankOne:
    """Raises on one of two ranks."""

    name = "failing"
    weight = 1.0

    def __call__(self, samples: Any) -> list[float]:
        if os.environ.get("RANK") == "1":
            raise RuntimeError("no more")
        return [float(index) for index, _ in enumerate(samples)]


class KeepsEachRank(Callback):
    """What each rank has learned, in RUN/rankN.safetensors."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        path = Path(trainer.default_root_dir) / f"rank{trainer.global_rank}.safetensors"
        save_file(pl_module.policy.trained_state(), path)


class SignalsItself(Callback):
    """A signal to one rank's own process, between the rollout of a policy version and its update.

    Args:
        rank: The rank.
        number: The signal.
        version: The policy version.
    """

    def __init__(self, rank: int, number: int, version: int) -> None:
        self.rank = rank
        self.number = number
        self.version = version

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, pl_module.policy_version) == (self.rank, self.version):
            signal.raise_signal(self.number)
