"""Full RL steps (sync, rollout, rewards, update) on real shapes: seconds a phase and peak memory.

    python benchmarks/rl_step.py --shape 7b --out results            # NVFP4, one copy of the weights
    python benchmarks/rl_step.py --shape 7b --copies 2 --out results # the trainer loads its own copy
    python benchmarks/rl_step.py --shape 7b --precision bf16 --out results

Memory is what the driver counts for the whole GPU, sampled every 20 ms, so nothing else may run on it.
"""

import argparse
import logging
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import random_model
import report
import torch
from lightning.pytorch import Callback
from qerl_kernels import select_backend

from qerl_pl.cli.main import QeRLCLI
from qerl_pl.rewards import RewardSample

GIB = 2**30
PHASES = ("time/sync_s", "time/rollout_s", "time/reward_s", "time/update_s")


class Spread:
    """A reward that differs between the completions of a group, so that the update is a real one."""

    name = "spread"
    weight = 1.0

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        return [sum(sample.token_ids) % 97 / 97 for sample in samples]


class DriverMemory(Callback):
    """Largest memory in use on the GPU, by phase of the run, and the times of each step."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self._phase = "start"
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                self.peaks[self._phase] = max(self.peaks.get(self._phase, 0.0), (total - free) / GIB)
            time.sleep(0.02)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop watching: a thread that is inside the driver when Python ends aborts the process."""
        self._stop.set()
        self._watcher.join()

    def on_train_start(self, *_: Any) -> None:
        self._phase = "rollout"  # the engine has started

    def on_train_batch_start(self, *_: Any) -> None:
        self._phase = "update"  # rollouts come from the callback before this one

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._phase = "rollout"
        metrics = trainer.callback_metrics
        names = (*PHASES, "mismatch/logprob_abs_mean", "aqn/sigma", "aqn/measured_std", "completions/length_mean")
        memory = [name for name in metrics if name.startswith("memory/")]
        self.steps.append({name: float(metrics[name]) for name in (*names, *memory) if name in metrics})


class MemoryTable(logging.Handler):
    """What the run holds after the first update, by its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    @classmethod
    def of_this_run(cls) -> "MemoryTable":
        """A table that the package's log fills."""
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        held = cls()
        logging.getLogger("qerl_pl").setLevel(logging.INFO)
        logging.getLogger("qerl_pl").addHandler(held)
        return held

    def emit(self, record: logging.LogRecord) -> None:
        head, _, items = record.getMessage().partition(": ")
        if head == "memory after the first update, GiB":
            self.rows = [item.split() for item in items.split(", ")]


def settings(args: argparse.Namespace, base: Path) -> dict[str, Any]:
    engine = {
        "class_path": "qerl_pl.engines.VLLMEngine",
        "init_args": {
            "kv_cache_gib": args.kv_gib,
            "max_num_seqs": args.group,
            "share_weights": args.copies == 1,
            "enforce_eager": args.eager,
        },
    }
    rollout = {
        "engine": engine,
        "group_size": args.group,
        "sampling": {"max_tokens": args.tokens},
        "rewards": [{"class_path": "rl_step.Spread"}],
        "mismatch_bound": 1.0,  # random weights: nothing to compare with
    }
    noise = {"stages": max(args.steps, 2)}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {
                "path": str(base),
                "quantization": "nvfp4" if args.precision == "nvfp4" else "none",
                "dtype": "bfloat16",
                "lora": {"rank": 32, "alpha": 32.0},
                "gradient_checkpointing": True,
            },
            "objective": {"class_path": "qerl_pl.algorithm.DAPO", "init_args": {"mask_truncated": False}},
            "micro_batch_tokens": args.micro_batch_tokens,
            "monitor_kl": False,
        },
        "data": {
            "class_path": "qerl_pl.datamodules.ArithmeticDataModule",
            "init_args": {"train_size": args.steps, "batch_size": 1, "val_size": 0},
        },
        "trainer": {
            "default_root_dir": str(args.out / "run"),
            "accelerator": "gpu" if torch.cuda.is_available() else "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "qerl_pl.callbacks.RolloutCallback", "init_args": rollout},
                {"class_path": "qerl_pl.callbacks.AdaptiveQuantizationNoise", "init_args": noise},
                {"class_path": "qerl_pl.callbacks.Monitor"},
                {"class_path": "rl_step.DriverMemory"},
            ],
        },
    }


def measure(document: dict[str, Any], held: MemoryTable) -> dict[str, Any]:
    """Run `qerl fit` with these settings: medians of all steps but the first, where there are more, and memory."""
    sys.argv = sys.argv[:1]
    began = time.perf_counter()
    cli = QeRLCLI({"subcommand": "fit", "fit": document})
    seconds = time.perf_counter() - began
    # The YAML names this class by its module, which is another one than __main__.
    memory = next(callback for callback in cli.trainer.callbacks if type(callback).__name__ == DriverMemory.__name__)
    later = memory.steps[1:] or memory.steps
    return {
        "median": {name: statistics.median(step[name] for step in later if name in step) for name in memory.steps[-1]},
        "steps": memory.steps,
        "peak_gib": memory.peaks,
        "memory_gib": dict(held.rows),
        "process_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="7b")
    parser.add_argument("--precision", choices=("nvfp4", "bf16"), default="nvfp4")
    parser.add_argument("--copies", type=int, choices=(1, 2), default=1)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kv-gib", type=float, default=2.0)
    parser.add_argument("--micro-batch-tokens", type=int, default=4608)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    held = MemoryTable.of_this_run()
    base = args.base / f"{args.shape}-{args.precision}"
    if not base.is_dir():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            select_backend("triton")
        random_model.write_model(base, args.shape, device, nvfp4=args.precision == "nvfp4")
        torch.cuda.empty_cache()
    result = measure(settings(args, base), held)
    result |= {"shape": args.shape, "precision": args.precision, "copies": args.copies}
    memory_peaks: dict[str, float] = result["peak_gib"]
    headers = ["shape", "base", "copies", "sync ms", "rollout s", "update s", "peak GiB start / rollout / update"]
    median: dict[str, float] = result["median"]
    peaks = " / ".join(f"{memory_peaks.get(phase, 0):.1f}" for phase in ("start", "rollout", "update"))
    row = [args.shape, args.precision, args.copies, f"{1e3 * median['time/sync_s']:.0f}"]
    row += [f"{median['time/rollout_s']:.2f}", f"{median['time/update_s']:.2f}", peaks]
    name = f"rl_step_{args.shape}_{args.precision}_{args.copies}"
    tables = [report.markdown(headers, [row]), report.markdown(["memory after the first update", "GiB"], held.rows)]
    report.write(args.out, name, "\n\n".join(tables), result)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
