"""Several ranks: real processes over gloo, started by Lightning's launcher from `qerl fit`."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from fit_helpers import adapter, configuration, ended, fit, fit_on_ranks, free_port, processes, start
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from short_run import data, fit_and_evaluate, module_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import distributed

from qerl_pl.errors import UserError
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.runtime import strategy as strategies
from qerl_pl.runtime.strategy import UnwrappedDDPStrategy

ROLLOUTS = 8
COMPARED = (
    "reward/mean",
    "optim/loss",
    "optim/grad_norm",
    "policy/kl",
    "policy/entropy",
    "completions/length_mean",
    "completions/groups_dropped_frac",
    "completions/groups_without_signal_frac",
    "completions/sampler_entropy",
    "completions/sampled_tokens",
    "val/accuracy",
    "val/pass@1",
)


def settings(base: Path, run: Path, devices: int) -> dict[str, Any]:
    """Two epochs of four rollouts of six prompts: dynamic sampling, noise, no dropout; five prompts to validate on."""
    config = configuration(base, run, summary=False)
    config["model"]["policy"]["lora"]["dropout"] = 0.0
    config["model"]["objective"]["init_args"] = {"beta": 0.1}
    config["model"]["optimizer"]["init_args"] = {"lr": 0.002}
    config["model"]["micro_batch_tokens"] = 200
    config["data"]["init_args"] |= {"train_size": 29, "batch_size": 6, "val_size": 5, "val_batch_size": 4}
    config["trainer"] |= {"devices": devices, "max_epochs": None, "max_steps": 4 * ROLLOUTS, "val_check_interval": 2}
    rollout = config["trainer"]["callbacks"][0]["init_args"]
    rollout["resample_rounds"] = 1
    rollout["sampling"]["stop"] = ["e", "1"]  # completions of several lengths
    rollout["rewards"] = [{"class_path": "fit_helpers.EvenVowels"}, {"class_path": "fit_helpers.Letters"}]
    return config


def launch(config: dict[str, Any], *extra: str, launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """Start `qerl fit` as a user does, by Lightning's launcher or another one."""
    run = Path(config["trainer"]["default_root_dir"])
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment["MASTER_PORT"] = str(free_port())  # Lightning's choice may be another's by the time it is used
    environment["TORCHDYNAMO_DISABLE"] = "1"  # its parts that PEFT imports with bitsandbytes take a second
    words = [sys.executable, *launcher, "-m", "qerl_pl", "fit", "-c", str(path), *extra]
    with run.with_suffix(".log").open("a") as output:
        return subprocess.Popen(words, env=environment, stdout=output, stderr=output, text=True)


def printed(config: dict[str, Any]) -> str:
    """What a launched run has printed."""
    return Path(config["trainer"]["default_root_dir"]).with_suffix(".log").read_text()


def train(config: dict[str, Any], *extra: str) -> Path:
    """A whole run on `trainer.devices` ranks."""
    if config["trainer"]["devices"] == 1:
        status, output = fit(config, *extra)
        statuses = [status]
    else:
        statuses, output = fit_on_ranks(config, *extra)
    assert not any(statuses), output
    return Path(config["trainer"]["default_root_dir"])


def completions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


def curves(run: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(run))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in COMPARED}


def learned(run: Path) -> dict[str, torch.Tensor]:
    """The adapter, or the whole model."""
    return load_file(run / "model" / "model.safetensors") if (run / "model").is_dir() else adapter(run)


@pytest.fixture(scope="module")
def alone(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(tiny_policy_dir, tmp_path_factory.mktemp("alone") / "run", 1))


@pytest.fixture(scope="module")
def two(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(tiny_policy_dir, tmp_path_factory.mktemp("two") / "run", 2))


def same_run(one: Path, other: Path) -> None:
    """The same completions in the first rollout, and the same curves to 1e-5."""
    first, second = completions(one), completions(other)
    assert len(first) == len(second)
    assert [row for row in first if row["version"] == 0] == [row for row in second if row["version"] == 0]
    expected, found = curves(one), curves(other)
    for tag, curve in expected.items():
        assert curve.keys() == found[tag].keys(), tag
        for step, value in found[tag].items():
            assert math.isclose(value, curve[step], rel_tol=1e-5, abs_tol=1e-5), (tag, step)
    first_learned, second_learned = learned(one), learned(other)
    assert first_learned.keys() == second_learned.keys()
    for name, tensor in first_learned.items():
        torch.testing.assert_close(second_learned[name], tensor, rtol=1e-3, atol=1e-5)


def test_two_ranks_are_one_run(alone: Path, two: Path) -> None:
    rows = completions(alone)
    assert {row["version"] for row in rows} == set(range(ROLLOUTS))
    assert any(not row["trained"] for row in rows) and len({row["tokens"] for row in rows}) > 1
    same_run(alone, two)


@pytest.mark.nightly
def test_three_ranks_are_one_run(alone: Path, tiny_policy_dir: Path, tmp_path: Path) -> None:
    same_run(alone, train(settings(tiny_policy_dir, tmp_path / "run", 3)))


def signalled(base: Path, run: Path, rank: int, number: int, version: int = 3) -> dict[str, Any]:
    """A run on two ranks, one of which gets a signal in a rollout: in the fourth, the first after a checkpoint."""
    config = settings(base, run, 2)
    init_args = {"rank": rank, "number": int(number), "version": version}
    config["trainer"]["callbacks"].append({"class_path": "fit_helpers.SignalsItself", "init_args": init_args})
    return config


def same_bits(one: Path, other: Path) -> None:
    first, second = adapter(one), adapter(other)
    assert first.keys() == second.keys() and all(torch.equal(second[name], first[name]) for name in first)
    assert completions(one) == completions(other)


def test_a_killed_rank_ends_the_run_with_its_reason(tiny_policy_dir: Path, tmp_path: Path) -> None:
    config = signalled(tiny_policy_dir, tmp_path / "run", 1, signal.SIGKILL, version=0)
    assert launch(config).wait(timeout=800) not in (0, -signal.SIGKILL), printed(config)
    assert printed(config).splitlines()[-1].startswith("qerl: rank 1: killed, or its machine or network is lost")


@pytest.mark.nightly
def test_torchrun_goes_on_bit_for_bit(two: Path, tiny_policy_dir: Path, tmp_path: Path) -> None:
    statuses, output = fit_on_ranks(signalled(tiny_policy_dir, tmp_path / "run", 1, signal.SIGKILL))
    assert statuses == [1, -signal.SIGKILL], output
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    config = settings(tiny_policy_dir, tmp_path / "run", 2)
    assert launch(config, "--resume", "auto", launcher=torchrun).wait(timeout=800) == 0, printed(config)
    assert "step=3.ckpt" in printed(config)
    same_bits(tmp_path / "run", two)


def test_a_killed_first_rank_ends_the_run_with_a_line_of_the_others_and_slurm_goes_on_bit_for_bit(
    two: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    """SLURM by what it tells each task; two machines of one process each, and one machine of two."""
    statuses, output = fit_on_ranks(signalled(tiny_policy_dir, tmp_path / "run", 0, signal.SIGKILL))
    assert statuses == [-signal.SIGKILL, 1], output
    (line,) = (line for line in output.splitlines() if line.startswith("qerl:"))
    assert line.startswith("qerl: rank 0: killed, or its machine or network is lost; ")
    assert line.endswith("run the command again, training with --resume auto")
    config = settings(tiny_policy_dir, tmp_path / "run", 1)
    config["trainer"]["num_nodes"] = 2
    path = tmp_path / "slurm.yaml"
    path.write_text(yaml.safe_dump(config))
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "qerl", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job |= {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_LOCALID": "0"}
    tasks = [
        start(
            ["fit", "-c", str(path), "--resume", "auto"],
            tmp_path / f"task{rank}.log",
            {**job, "SLURM_PROCID": rank, "SLURM_NODEID": rank},
        )
        for rank in range(2)
    ]
    statuses, output = ended(tasks)
    assert statuses == [0, 0] and "step=3.ckpt" in output, output
    same_bits(tmp_path / "run", two)


def test_a_signal_to_any_rank_saves_everywhere_and_the_run_goes_on_on_another_number_of_ranks(
    alone: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    statuses, output = fit_on_ranks(signalled(tiny_policy_dir, tmp_path / "run", 1, signal.SIGTERM))
    assert statuses == [128 + signal.SIGTERM] * 2, output
    (last,) = (line for line in output.splitlines() if line.startswith("qerl:"))
    assert "stopped by SIGTERM; state saved in" in last and "step=4.ckpt" in last
    same_run(alone, train(settings(tiny_policy_dir, tmp_path / "run", 3), "--resume", "auto"))


def short(base: Path, run: Path, devices: int) -> dict[str, Any]:
    config = settings(base, run, devices)
    config["trainer"] |= {"max_steps": 8, "val_check_interval": 2}
    return config


@pytest.mark.vllm
def test_an_engine_a_rank_with_noise(tiny_policy_dir: Path, tmp_path: Path) -> None:
    config = short(tiny_policy_dir, tmp_path / "run", 2)
    rollout, noise = (callback["init_args"] for callback in config["trainer"]["callbacks"][:2])
    rollout |= {"engine": {"class_path": "qerl_pl.engines.VLLMEngine"}, "resample_rounds": 0}
    noise |= {"stages": 1, "noiseless_first_stage": False}
    run = train(config)
    assert [row["version"] for row in completions(run)] == [0] * 12 + [1] * 12
    events = EventAccumulator(str(run))
    events.Reload()
    asked, measured = ([event.value for event in events.Scalars(f"aqn/{tag}")] for tag in ("sigma", "measured_std"))
    assert asked == pytest.approx([0.01, 0.01]) and measured == pytest.approx(asked, rel=0.01)


def test_mistakes_get_one_line_once(tiny_policy_dir: Path, tmp_path: Path) -> None:
    status, output = fit(settings(tiny_policy_dir, tmp_path / "run", 4))
    assert status == 2
    lines = [line for line in output.splitlines() if line.startswith("qerl:")]
    assert lines == [
        "qerl: data.batch_size must be a multiple of the number of devices; got 6 for 4; change one of them"
    ]


def test_a_rank_that_raises_ends_the_run_with_its_reason(tiny_policy_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_policy_dir, tmp_path / "run", 2)
    config["trainer"]["callbacks"][0]["init_args"]["rewards"] = [{"class_path": "fit_helpers.FailsOnRankOne"}]
    statuses, output = fit_on_ranks(config)
    assert statuses == [2, 2], output
    (line,) = (line for line in output.splitlines() if line.startswith("qerl:"))
    assert line.startswith("qerl: rank 1: ") and ("FailsOnRankOne" in line or "failing" in line)


def test_a_script_on_two_devices_is_one_run_over_all_its_stages(tiny_policy_dir: Path, tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        processes().Process(
            target=fit_and_evaluate,
            args=(tiny_policy_dir, tmp_path, 2, place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=800)
    assert [process.exitcode for process in started] == [0, 0]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = tmp_path / "alone"
    alone.mkdir()
    fit_and_evaluate(tiny_policy_dir, alone, 1, {})
    expected = json.loads((alone / "rank0.json").read_text())
    for found in ranks:  # each has all prompts
        assert found["metrics"] == [pytest.approx(metrics) for metrics in expected["metrics"]]
        assert found["weights"] == ranks[0]["weights"]
    for name, values in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(ranks[0]["weights"][name]), torch.tensor(values), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"devices": 2}, "DDPStrategy for 2"),
        ({"devices": 3, "strategy": "ddp"}, "DDPStrategy for 3"),
        ({"devices": 2, "strategy": "ddp_find_unused_parameters_true"}, "DDPStrategy for 2"),
        ({"devices": 2, "strategy": "ddp_spawn"}, "DDPStrategy for 2"),
        ({"devices": 2, "strategy": "ddp_notebook"}, "DDPStrategy for 2"),
        ({"devices": 2, "strategy": DDPStrategy(static_graph=True)}, "DDPStrategy for 2"),
        ({"devices": 1, "num_nodes": 2}, "DDPStrategy for 2"),
        ({"devices": 1, "strategy": "ddp"}, "DDPStrategy for 1"),
        ({"devices": 1}, None),
        ({"devices": 2, "strategy": UnwrappedDDPStrategy()}, None),
        ({"devices": 1, "strategy": UnwrappedDDPStrategy()}, None),
    ],
)
def test_a_script_on_several_devices_needs_their_strategy(settings: Any, found: str | None) -> None:
    trainer, module = Trainer(accelerator="cpu", max_epochs=1, logger=False, **settings), module_of(Path("nowhere"))
    for stage in ("fit", "test"):
        with pytest.raises(UserError, match=f"strategy; got {found}; give") if found else nullcontext():
            PolicyModule.check_first(module, trainer, stage)


@pytest.mark.parametrize(("devices", "fits"), [(2, True), (1, True), (3, False), (4, False)])
def test_a_script_has_a_batch_that_its_devices_divide(devices: int, fits: bool) -> None:
    task, strategy = data(), UnwrappedDDPStrategy() if devices > 1 else "auto"
    task.trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)
    with nullcontext() if fits else pytest.raises(UserError, match=f"multiple of .* devices; got 2 for {devices}"):
        task._check_settings("fit", 8, 2)


def test_collectives_wait_for_the_longest_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default NCCL would end the run after ten minutes, and gloo after thirty."""
    asked: list[timedelta] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: asked.append(self._timeout))
    monkeypatch.setattr(distributed, "new_group", lambda *_, timeout=timedelta(0), **__: asked.append(timeout))
    monkeypatch.setattr(strategies, "FailureDetector", lambda *_: None)
    strategy = UnwrappedDDPStrategy()
    strategy.cluster_environment, strategy.parallel_devices = LightningEnvironment(), [torch.device("cpu")]
    strategy._own_launcher = SimpleNamespace(procs=[], have_met=threading.Event())  # type: ignore[assignment]
    strategy.setup_environment()
    assert len(asked) == 2 and min(asked) >= timedelta(hours=12)
