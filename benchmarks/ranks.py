"""The same run on one GPU and on several of one machine: seconds a step, tokens/s a GPU, killed ranks.

    python benchmarks/ranks.py shapes --devices 1 2 4 --out results       # four GPUs; the table is written as it comes
    python benchmarks/ranks.py killed --devices 4 --out results
    python benchmarks/ranks.py killed --devices 2 --accelerator cpu --engine TransformersEngine --out results
    python benchmarks/ranks.py killed --devices 1 --shape qwen3.5-9b --layers 8 --rollouts 8 --out results

killed   the quickstart on the largest number, one rank killed (SIGKILL), then all of them, each resumed; with a shape
         its random weights in place of the toy's
shapes   random weights of a 7B in NVFP4 and 16 bits: 16 and 64 prompts a rank with 8 completions of 512 tokens
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import random_model
import report
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from qerl_kernels import select_backend
from safetensors.torch import load_file
from step_timer import StepTimer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from qerl_pl.callbacks import RolloutCallback
from qerl_pl.datamodules import ArithmeticDataModule
from qerl_pl.runtime.strategy import communicator_of

ROOT = Path(__file__).parent.parent
PHASES = ("sync", "rollout", "wait", "update", "sleep")
WARM_UP = 2
"""Steps that are left out."""


def scalars(run: Path) -> dict[str, list[float]]:
    """What TensorBoard shows of a run, by tag, in the order of steps."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def launch(words: list[str], own: Mapping[str, str] = {}) -> "subprocess.Popen[bytes]":
    """A `qerl fit`, which finds this folder's modules."""
    paths = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, "-m", "qerl_pl", "fit", *words], env=environment)


def cache_dirs(run: Path) -> dict[str, str]:
    """Compile caches of a run, which other runs that start beside it do not share."""
    return {"VLLM_CACHE_ROOT": f"{run}-vllm", "TRITON_CACHE_DIR": f"{run}-triton"}


def finish(process: "subprocess.Popen[bytes]", name: str) -> None:
    if process.wait():
        raise SystemExit(f"{name} ended with status {process.returncode}")


def written(base: Path, shape: str, **settings: bool | int | None) -> Path:
    """The folder of a checkpoint of random weights, written where it is missing."""
    if not base.is_dir():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            select_backend("triton")
        random_model.write_model(base, shape, device, **settings)  # type: ignore[arg-type]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return base


def quickstart(run: Path, base: Path | None, args: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """A `qerl fit` of the toy policy, or of a base of random weights in its place."""
    words = ["-c", str(ROOT / "configs" / "quickstart.yaml"), "--resume=auto", "--model.policy.dtype=bfloat16"]
    words += [f"--trainer.accelerator={args.accelerator}", f"--trainer.devices={args.devices[-1]}"]
    words += [f"--trainer.default_root_dir={run}", f"--trainer.max_steps={args.rollouts}"]
    words += [f"--rollout.engine={args.engine}", "--trainer.val_check_interval=1000", "--data.val_size=16"]
    if args.engine == "VLLMEngine":
        words.append(f"--rollout.engine.init_args.kv_cache_gib={4.0 if base else 0.5}")
    if base:
        words += [f"--model.policy.path={base}", "--model.policy.quantization=nvfp4"]
        words.append("--rollout.rewards=[ranks.even]")
    words += [f"--checkpoint.every_n_rollouts={args.rollouts // 4}", "--trainer.enable_progress_bar=false"]
    return launch(words, cache_dirs(run))


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that random weights differ in: the share of even tokens."""
    return [statistics.mean(1 - token % 2 for token in ids) for ids in completion_ids]


def part_killed(args: argparse.Namespace, write: Callable[[str, Any], None]) -> None:
    """One rank or all killed after the first checkpoint, and resumed, against a run that was not."""
    base = None
    if args.shape:
        base = written(args.base / f"{args.shape}-{args.layers}-layers", args.shape, layers=args.layers, codes=True)
    reference = args.folder / "uninterrupted"
    uninterrupted = quickstart(reference, base, args)
    interrupted = ("one rank", "all ranks")[args.devices[-1] == 1 :]
    with ThreadPoolExecutor() as pool:  # side by side: only bits are compared
        ended = pool.map(lambda which: killed_and_resumed(which, base, args), interrupted)
        finish(uninterrupted, "the uninterrupted run")
        expected, rows = adapter_of(reference), []
        if not any(tensor.any() for name, tensor in expected.items() if "lora_B" in name):
            raise SystemExit("nothing was trained")
        for which, (adapter, status, seconds) in zip(interrupted, ended, strict=True):
            same = all(torch.equal(adapter[name], tensor) for name, tensor in expected.items())
            rows.append([args.devices[-1], which, status, f"{seconds:.1f}", same])
            headers = ["devices", "killed", "status", "s until the run had ended", "same adapter bits after resuming"]
            write(report.markdown(headers, rows), rows)


def killed_and_resumed(
    which: str, base: Path | None, args: argparse.Namespace
) -> tuple[dict[str, torch.Tensor], int, float]:
    """Adapter of a run killed after its first checkpoint and resumed, its status when killed, seconds to its end."""
    run = args.folder / which.replace(" ", "-")
    process = quickstart(run, base, args)
    while process.poll() is None and not list(run.glob("checkpoints/step=*.ckpt")):
        time.sleep(0.02)
    ranks = [one for one in psutil.Process(process.pid).children() if "qerl_pl" in " ".join(one.cmdline())]
    started = time.perf_counter()
    for rank in ranks[:1] if which == "one rank" else ranks:
        rank.send_signal(signal.SIGKILL)
    if which == "all ranks":
        process.kill()
    status, seconds = process.wait(), time.perf_counter() - started
    finish(quickstart(run, base, args), "the resumed run")
    return adapter_of(run), status, seconds


class Sizes(ArithmeticDataModule):
    """Batches of each size in turn, `repeats` of each."""

    def __init__(self, sizes: list[int], repeats: list[int], **settings: Any) -> None:
        rows = sum(size * count for size, count in zip(sizes, repeats, strict=True))
        super().__init__(train_size=rows, batch_size=min(sizes), val_size=0, **settings)
        self.sizes = [size for size, count in zip(sizes, repeats, strict=True) for _ in range(count)]

    def train_dataloader(self) -> DataLoader[Any]:  # type: ignore[override]
        rows = iter(range(len(self._train)))
        batches = [list(itertools.islice(rows, size)) for size in self.sizes]
        return DataLoader(self._train, batch_sampler=batches, collate_fn=self._batch_class)  # type: ignore[arg-type]


class Turn(Callback):
    """With the engine started and asleep, wait until a file says that this run is to be measured."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        next(one for one in trainer.callbacks if isinstance(one, RolloutCallback)).engine.sleep()  # type: ignore[attr-defined]
        (self.folder / f"ready{trainer.global_rank}").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.05)
        if trainer.world_size > 1:
            self._time_all_reduce(trainer)
        self._note(trainer)

    def _time_all_reduce(self, trainer: Trainer) -> None:
        """Seconds of one all-reduce as large as all gradients, of 20 in a row after one more."""
        parameters = trainer.lightning_module.parameters()
        gradients = [torch.zeros_like(parameter) for parameter in parameters if parameter.requires_grad]
        for count in (1, 20):
            started = StepTimer.now()
            for _ in range(count):
                communicator_of(trainer).all_reduce(gradients)
        if trainer.is_global_zero:
            (self.folder / "all_reduce_s").write_text(f"{(StepTimer.now() - started) / 20}")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer)

    def _note(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            with (self.folder / "ends").open("a") as file:
                file.write(f"{StepTimer.now()}\n")


def settings(args: argparse.Namespace, base: Path, run: Path, devices: int, kind: str) -> dict[str, Any]:
    options = {"kv_cache_gib": args.kv_gib, "max_num_seqs": 512, "share_weights": kind != "none"}
    engine = {"class_path": args.engine, "init_args": options if args.engine == "VLLMEngine" else {}}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {
                **{"path": str(base), "quantization": kind, "lora": {"rank": 32, "alpha": 32.0}},
                "gradient_checkpointing": True,  # "auto" would see the memory of the runs that wait
            },
            "objective": {"class_path": "DAPO", "init_args": {"mask_truncated": False}},
            "micro_batch_tokens": 16384,
            "monitor_kl": False,
        },
        "data": {
            "class_path": "ranks.Sizes",
            "init_args": {
                "sizes": [prompts * devices for prompts in args.prompts],
                **{"repeats": args.steps, "max_prompt_tokens": 128},
            },
        },
        "rollout": {
            "engine": engine,
            "group_size": 8,
            "sampling": {"max_tokens": args.tokens},
            "rewards": ["step_ours.Spread"],
            "mismatch_bound": 1.0,  # random weights: nothing to compare with
        },
        "checkpoint": None,
        "best": None,
        "trainer": {
            **{"default_root_dir": str(run), "accelerator": args.accelerator, "devices": devices, "max_epochs": 1},
            **{"log_every_n_steps": 1, "enable_model_summary": False, "enable_progress_bar": False},
            **{"use_distributed_sampler": False, "limit_train_batches": sum(args.steps)},
            "callbacks": [{"class_path": "ranks.Turn", "init_args": {"folder": str(run)}}],
        },
    }


def start(kind: str, devices: int, first: int, args: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """A run on the GPUs from the first on, with caches of its own, which waits for its turn."""
    base, run = args.base / f"{args.shape}-{kind}", args.folder / f"{kind}-{devices}"
    run.mkdir(parents=True)
    (run / "run.yaml").write_text(yaml.safe_dump(settings(args, base, run, devices, kind)))
    own = {**cache_dirs(run), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + devices)))}
    return launch(["-c", str(run / "run.yaml")], own)


def row_of(kind: str, devices: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians by size, over the steps after the first two of the run."""
    run = args.folder / f"{kind}-{devices}"
    values, ends = scalars(run), [float(line) for line in (run / "ends").read_text().split()]
    values["seconds"] = [end - start for start, end in itertools.pairwise(ends)]
    results: dict[str, Any] = {"all_reduce_s": float((run / "all_reduce_s").read_text()) if devices > 1 else 0.0}
    begin = WARM_UP
    for prompts, end in zip(args.prompts, itertools.accumulate(args.steps), strict=True):
        later = {tag: series[begin:end] for tag, series in values.items()}
        tokens = [length * prompts * 8 for length in later["completions/length_mean"]]
        results[str(prompts)] = {"seconds": later.pop("seconds"), "tokens_of_a_gpu": tokens, "all": later}
        begin = end
    return results


def part_shapes(args: argparse.Namespace, write: Callable[[str, Any], None]) -> None:
    """All runs start at once; they are measured in waves of runs that share no GPU."""
    waves: list[list[tuple[str, int, int]]] = []
    for index, kind in enumerate(args.kinds):  # by GPUs and the first of them, so that no GPU holds too many runs
        waves += [[(kind, devices, 0)] for devices in args.devices if devices > 2]
        waves.append([(kind, devices, (devices - 1) * (1 + index)) for devices in args.devices if devices <= 2])
    args.shape = args.shape or "7b"
    for kind in args.kinds:
        written(args.base / f"{args.shape}-{kind}", args.shape, nvfp4=kind == "nvfp4")
    running = {run: start(*run, args) for wave in waves for run in wave}
    for run, process in running.items():
        folder = args.folder / f"{run[0]}-{run[1]}"
        while len(list(folder.glob("ready*"))) < run[1] and process.poll() is None:
            time.sleep(0.2)
    results: dict[str, Any] = {}
    for wave in waves:
        for kind, devices, _ in wave:
            (args.folder / f"{kind}-{devices}" / "go").touch()
        for kind, devices, first in wave:
            if running[kind, devices, first].wait():
                sys.stderr.write(f"{kind} on {devices} has failed\n")
            else:
                results[f"{kind}-{devices}"] = row_of(kind, devices, args)
        write(table_of(results, args), results)


def table_of(results: dict[str, Any], args: argparse.Namespace) -> str:
    rows = []
    for kind in args.kinds:
        for prompts in map(str, args.prompts):
            for devices in args.devices:
                if f"{kind}-{devices}" not in results:
                    continue
                one = results[f"{kind}-{devices}"][prompts]
                rates = [count / spent for count, spent in zip(one["tokens_of_a_gpu"], one["seconds"], strict=True)]
                alone = results.get(f"{kind}-1", {}).get(prompts)
                share = "–"
                if alone:
                    pairs = zip(alone["tokens_of_a_gpu"], alone["seconds"], strict=True)
                    share = f"{statistics.median(rates) / statistics.median(t / s for t, s in pairs):.3f}"
                seconds = one["seconds"]
                row = [kind, f"{prompts} x 8 x {args.tokens}", devices, f"{statistics.median(seconds):.2f}"]
                row += [f"{min(seconds):.2f} to {max(seconds):.2f}", f"{statistics.median(rates):.0f}", share]
                row += [f"{statistics.median(one['all'][f'time/{name}_s']):.2f}" for name in PHASES]
                all_reduce_ms = 1000 * results[f"{kind}-{devices}"]["all_reduce_s"]
                rows.append([*row, f"{all_reduce_ms:.1f}", f"{max(one['all']['memory/peak_gib']):.1f}"])
    headers = [
        "base",
        "a rank",
        "GPUs",
        "s a step",
        "range",
        "tokens/s a GPU",
        "of one GPU's",
        *PHASES,
        "ms an all-reduce",
        "peak GiB of PyTorch",
    ]
    return report.markdown(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("killed", "shapes"))
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kinds", nargs="+", default=["nvfp4", "none"])
    parser.add_argument("--shape", help="of random weights; of `shapes` 7b")
    parser.add_argument("--layers", type=int, help="of a run that is killed")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64], help="a rank")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 2], help="of each number of prompts")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--engine", default="VLLMEngine")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--rollouts", type=int, default=20, help="of a run that is killed")
    parser.add_argument("--kv-gib", type=float, default=10.0)
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"))
    parser.add_argument("--folder", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.folder = args.folder.absolute() / args.part
    shutil.rmtree(args.folder, ignore_errors=True)

    def write(table: str, result: Any) -> None:
        report.write(args.out, f"ranks_{args.part}_{'_'.join(map(str, args.devices))}", table, result)

    (part_killed if args.part == "killed" else part_shapes)(args, write)


if __name__ == "__main__":
    main()
