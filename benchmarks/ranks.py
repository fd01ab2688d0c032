"""The same run on one GPU and on several of one machine: seconds a step, tokens/s a GPU, killed ranks.

    python benchmarks/ranks.py --devices 1 2 4 --out results       # each part's table is written as it comes
    python benchmarks/ranks.py --devices 1 2 --parts killed --accelerator cpu --engine TransformersEngine --out results

killed        the quickstart on the largest number, one rank killed (SIGKILL), then all of them, each resumed
nvfp4, none   random weights of a 7B in that format: 16 and 64 prompts a rank with 8 completions of 512 tokens
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import random_model
import report
import torch
import yaml
from qerl_kernels import select_backend
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
PHASES = ("sync", "rollout", "reward", "wait", "update", "sleep")
WARM_UP = 2
"""Steps that are left out."""


def scalars(run: Path) -> dict[str, list[float]]:
    """What TensorBoard shows of a run, by tag, in the order of steps."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def launch(words: list[str]) -> "subprocess.Popen[bytes]":
    """A `qerl fit`, which finds this folder's modules."""
    paths = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, "-m", "qerl_pl", "fit", *words], env=environment)


def finish(process: "subprocess.Popen[bytes]", name: str) -> None:
    if process.wait():
        raise SystemExit(f"{name} ended with status {process.returncode}")


def quickstart(run: Path, args: argparse.Namespace) -> list[str]:
    words = ["-c", str(ROOT / "configs" / "quickstart.yaml"), "--resume=auto", "--model.policy.dtype=bfloat16"]
    words += [f"--trainer.accelerator={args.accelerator}", f"--trainer.devices={args.devices[-1]}"]
    words += [f"--trainer.default_root_dir={run}", f"--trainer.max_steps={args.rollouts}"]
    words += [f"--rollout.engine={args.engine}", "--trainer.val_check_interval=1000", "--data.val_size=16"]
    return [*words, f"--checkpoint.every_n_rollouts={args.rollouts // 4}", "--trainer.enable_progress_bar=false"]


def part_killed(args: argparse.Namespace) -> tuple[str, Any]:
    """One rank or all killed after the first checkpoint, and resumed, against a run that was not."""
    uninterrupted = args.folder / "uninterrupted"
    finish(launch(quickstart(uninterrupted, args)), "the uninterrupted run")
    expected, rows = load_file(uninterrupted / "adapter" / "adapter_model.safetensors"), []
    for which in ("one rank", "all ranks"):
        run = args.folder / which.replace(" ", "-")
        process = launch(quickstart(run, args))
        while process.poll() is None and not list(run.glob("checkpoints/step=*.ckpt")):
            time.sleep(0.02)
        ranks = [one for one in psutil.Process(process.pid).children() if "qerl_pl" in " ".join(one.cmdline())]
        started = time.perf_counter()
        for rank in ranks[:1] if which == "one rank" else ranks:
            rank.send_signal(signal.SIGKILL)
        if which == "all ranks":
            process.kill()
        status, seconds = process.wait(), time.perf_counter() - started
        finish(launch(quickstart(run, args)), "the resumed run")
        found = load_file(run / "adapter" / "adapter_model.safetensors")
        same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        rows.append([args.devices[-1], which, status, f"{seconds:.1f}", same])
    headers = ["devices", "killed", "status", "s until the run had ended", "same adapter bits after resuming"]
    return report.markdown(headers, rows), rows


def settings(args: argparse.Namespace, base: Path, run: Path, devices: int, prompts: int, kind: str) -> dict[str, Any]:
    engine = {"kv_cache_gib": args.kv_gib, "max_num_seqs": 512, "share_weights": kind != "none"}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {"path": str(base), "quantization": kind, "lora": {"rank": 32, "alpha": 32.0}},
            "objective": {"class_path": "DAPO", "init_args": {"mask_truncated": False}},
            "micro_batch_tokens": 16384,
            "monitor_kl": False,
        },
        "data": {
            "class_path": "ArithmeticDataModule",
            "init_args": {
                **{"train_size": prompts * devices * args.steps, "batch_size": prompts * devices, "val_size": 0},
                "max_prompt_tokens": 128,
            },
        },
        "rollout": {
            "engine": {"class_path": "VLLMEngine", "init_args": engine},
            "group_size": 8,
            "sampling": {"max_tokens": 512},
            "rewards": ["rl_step.Spread"],
            "mismatch_bound": 1.0,  # random weights: nothing to compare with
        },
        "checkpoint": None,
        "best": None,
        "trainer": {
            **{"default_root_dir": str(run), "accelerator": "gpu", "devices": devices, "max_epochs": 1},
            **{"log_every_n_steps": 1, "enable_model_summary": False, "enable_progress_bar": False},
        },
    }


def part_shape(kind: str, args: argparse.Namespace) -> tuple[str, Any]:
    """Steps on each number of devices with a constant batch a rank; medians over the steps after the first two."""
    base = Path("/dev/shm/qerl-shapes") / f"7b-{kind}"
    if not base.is_dir():
        select_backend("triton")
        random_model.write_model(base, "7b", torch.device("cuda"), nvfp4=kind == "nvfp4")
        torch.cuda.empty_cache()
    rows, found = [], {}
    for prompts in args.prompts:
        one = None
        for devices in args.devices:
            run = args.folder / f"{kind}-{prompts}-{devices}"
            run.mkdir(parents=True)
            (run / "run.yaml").write_text(yaml.safe_dump(settings(args, base, run, devices, prompts, kind)))
            finish(launch(["-c", str(run / "run.yaml")]), run.name)
            later = {tag: values[WARM_UP:] for tag, values in scalars(run).items()}
            seconds = [sum(step) for step in zip(*(later[f"time/{name}_s"] for name in PHASES[:-1]), strict=True)]
            rate = [value / devices for value in later["perf/tokens_per_s"]]
            found[run.name] = later
            one = one or statistics.median(rate)
            row = [f"{prompts} x 8 x 512", devices, f"{statistics.median(seconds):.2f}"]
            row += [f"{statistics.median(rate):.0f} ({min(rate):.0f} to {max(rate):.0f})"]
            row += [f"{statistics.median(rate) / one:.3f}"]
            row += [f"{statistics.median(later[f'time/{name}_s']):.2f}" for name in PHASES[:-1]]
            rows.append([*row, f"{max(later['memory/driver_gib']):.1f}"])
    headers = ["a rank", "GPUs", "s a step", "tokens/s a GPU (range)", "of one GPU's", *PHASES[:-1], "GiB"]
    return f"{kind}:\n\n{report.markdown(headers, rows)}", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", nargs="+", default=["killed", "nvfp4", "none"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64], help="a rank")
    parser.add_argument("--engine", default="VLLMEngine")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    tables, results = [], {}
    for part in args.parts:
        table, results[part] = part_killed(args) if part == "killed" else part_shape(part, args)
        tables.append(table)
        report.write(args.out, f"ranks_{'_'.join(map(str, args.devices))}", "\n\n".join(tables), results)


if __name__ == "__main__":
    main()
