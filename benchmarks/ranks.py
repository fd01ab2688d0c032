"""The same run on one GPU and on several of one machine: curves, completions a second, a killed rank.

    python benchmarks/ranks.py --devices 1 2 --out results          # each part's result is written as it comes
    python benchmarks/ranks.py --devices 1 2 --parts toy --engine transformers --accelerator cpu --out results

toy     the quickstart in bfloat16 on each number of devices: validations and rewards side by side
killed  the same on the largest number, one rank killed (SIGKILL) after the first checkpoint, then resumed by torchrun
7b, 32b random weights of that shape, 32 completions of 512 tokens a device after prompts of about 256 tokens
"""

import argparse
import json
import os
import shutil
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
ENGINES = {"vllm": "qerl_pl.engines.VLLMEngine", "transformers": "qerl_pl.engines.TransformersEngine"}
PHASES = ("time/sync_s", "time/rollout_s", "time/reward_s", "time/update_s", "time/wait_s", "time/sleep_s")
CURVES = ("reward/mean", "val/pass@1", "policy/entropy", "optim/grad_norm", "mismatch/logprob_abs_mean")


def scalars(run: Path, tags: tuple[str, ...]) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a run, by tag and step."""
    events = EventAccumulator(str(run))
    events.Reload()
    known = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags if tag in known}


def launch(words: list[str], torchrun: int | None = None) -> "subprocess.Popen[bytes]":
    """A `qerl fit`, which finds this folder's modules; by so many processes of torchrun where that is asked for."""
    places = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}", "-m"] if torchrun else []
    return subprocess.Popen(
        [sys.executable, "-m", *start, "qerl_pl", "fit", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )


def toy(run: Path, devices: int, args: argparse.Namespace) -> list[str]:
    """The quickstart on so many devices."""
    steps = args.rollouts
    words = ["-c", str(ROOT / "configs" / "quickstart.yaml"), "--resume=auto", "--model.policy.dtype=bfloat16"]
    words += [f"--trainer.accelerator={args.accelerator}", f"--trainer.devices={devices}"]
    words += [f"--trainer.default_root_dir={run}", f"--trainer.max_steps={steps}"]
    words += [f"--trainer.val_check_interval={steps // 2}", "--trainer.enable_progress_bar=false"]
    words += [f"--checkpoint.every_n_rollouts={steps // 4}"]
    return [*words, f"--rollout.engine={ENGINES[args.engine]}"]


def part_toy(args: argparse.Namespace) -> dict[str, Any]:
    """Curves of the toy policy on each number of devices."""
    curves, seconds = {}, {}
    for devices in args.devices:
        run, start = args.folder / f"toy-{devices}", time.perf_counter()
        if launch(toy(run, devices, args)).wait():
            raise SystemExit(f"the toy run on {devices} devices failed")
        seconds[devices], curves[devices] = time.perf_counter() - start, scalars(run, CURVES)
    rows = []
    for devices, curve in curves.items():
        rewards, held_out = list(curve["reward/mean"].values()), list(curve["val/pass@1"].values())
        first = curves[args.devices[0]]["reward/mean"]
        apart = max(abs(value - first[step]) for step, value in curve["reward/mean"].items() if step < 3)
        row = [
            devices,
            f"{seconds[devices]:.0f}",
            *(f"{statistics.mean(part):.3f}" for part in (rewards[:3], rewards[-3:])),
        ]
        rows.append([*row, " → ".join(f"{value:.3f}" for value in held_out), f"{apart:.1e}"])
    headers = ["devices", "s, starts included", "reward, first 3", "last 3", "held-out pass@1", "first 3 rewards apart"]
    return {"table": report.markdown(headers, rows), "curves": curves}


def part_killed(args: argparse.Namespace) -> dict[str, Any]:
    """A rank killed after the first checkpoint; the run, resumed by torchrun, against the one of part toy."""
    devices = args.devices[-1]
    whole, run = args.folder / f"toy-{devices}", args.folder / "killed"
    process = launch(toy(run, devices, args))
    while process.poll() is None and not list(run.glob("checkpoints/step=*.ckpt")):
        time.sleep(0.02)
    killed = time.perf_counter()
    next(one for one in psutil.Process(process.pid).children() if "qerl_pl" in " ".join(one.cmdline())).kill()
    status = process.wait()
    seconds = time.perf_counter() - killed
    resumed = launch(toy(run, devices, args), torchrun=devices).wait()
    one, other = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (whole, run))
    same = all(torch.equal(one[name], other[name]) for name in one)
    headers = [
        "devices",
        "status after the kill",
        "s until the run had ended",
        "status of the run resumed by torchrun",
        "same adapter bits",
    ]
    return {"table": report.markdown(headers, [[devices, status, f"{seconds:.1f}", resumed, same]])}


def settings(args: argparse.Namespace, base: Path, run: Path, devices: int) -> dict[str, Any]:
    engine = {"class_path": ENGINES["vllm"], "init_args": {"kv_cache_gib": args.kv_gib, "max_num_seqs": 32}}
    rollout = {
        "engine": engine,
        "group_size": 8,
        "sampling": {"max_tokens": args.tokens},
        "rewards": [{"class_path": "rl_step.Spread"}],
        "mismatch_bound": 1.0,  # random weights: nothing to compare with
    }
    policy = {"path": str(base), "lora": {"rank": 32, "alpha": 32.0}, "gradient_checkpointing": True}
    objective = {"class_path": "qerl_pl.algorithm.DAPO", "init_args": {"mask_truncated": False}}
    model = {"policy": policy, "objective": objective, "micro_batch_tokens": 6144, "monitor_kl": False}
    data = {"train_size": 4 * devices * args.steps, "batch_size": 4 * devices, "val_size": 0}
    trainer = {
        "default_root_dir": str(run),
        "accelerator": "gpu",
        "devices": devices,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "callbacks": [
            {"class_path": "qerl_pl.callbacks.RolloutCallback", "init_args": rollout},
            {"class_path": "qerl_pl.callbacks.AdaptiveQuantizationNoise", "init_args": {"stages": args.steps}},
            {"class_path": "qerl_pl.callbacks.Monitor"},
        ],
    }
    arithmetic = {"class_path": "qerl_pl.datamodules.ArithmeticDataModule", "init_args": data}
    return {"seed_everything": 0, "model": model, "data": arithmetic, "trainer": trainer}


def part_shape(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Completions a second on each number of devices; medians over the steps after the first two."""
    base = Path("/dev/shm/qerl-shapes") / shape
    if not base.is_dir():
        select_backend("triton")
        random_model.write_model(base, shape, torch.device("cuda"))
        torch.cuda.empty_cache()
    rows, found = [], {}
    for devices in args.devices if shape == "7b" else args.devices[-1:]:
        run = args.folder / f"{shape}-{devices}"
        run.mkdir(parents=True)
        path = run / "settings.yaml"
        path.write_text(yaml.safe_dump(settings(args, base, run, devices)))
        if launch(["-c", str(path)]).wait():
            raise SystemExit(f"the {shape} run on {devices} devices failed")
        steps = scalars(run, (*PHASES, "perf/tokens_per_s", "memory/driver_gib", "memory/peak_gib"))
        later = {tag: list(values.values())[2:] for tag, values in steps.items()}
        rate = [value / args.tokens for value in later["perf/tokens_per_s"]]
        found[devices] = later | {"completions_per_s": rate}
        base_rate = statistics.median(found[1]["completions_per_s"]) if 1 in found else None
        median = statistics.median(rate)
        row = [shape, devices, f"{median:.2f} ({min(rate):.2f} to {max(rate):.2f})"]
        row.append(f"{median / base_rate:.2f}" if base_rate else "-")
        phases = (statistics.median(later[tag]) if tag in later else 0.0 for tag in PHASES[:5])
        rows.append([*row, *(f"{value:.2f}" for value in phases), f"{max(later['memory/driver_gib']):.1f}"])
    headers = [
        "shape",
        "GPUs",
        "completions/s, median (range)",
        "over one",
        *(tag[5:-2] + " s" for tag in PHASES[:5]),
        "GiB",
    ]
    return {"table": report.markdown(headers, rows), "steps": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", nargs="+", default=["toy", "killed", "7b", "32b"])
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    tables, results = [], {}
    for part in args.parts:
        work = {"toy": part_toy, "killed": part_killed}.get(part)
        results[part] = work(args) if work else part_shape(part, args)
        tables.append(results[part].pop("table"))
        report.write(
            args.out, f"ranks_{args.engine}_{args.accelerator}", "\n\n".join(tables), json.loads(json.dumps(results))
        )


if __name__ == "__main__":
    main()
