"""One copy of the weights or two, killed or not: four runs of the toy policy that must end the same.

    python benchmarks/one_copy.py --out results                                            # a GPU with vLLM
    python benchmarks/one_copy.py --engine transformers --accelerator cpu --out results    # does the script run?

Each mode (the trainer borrows vLLM's Marlin tensors, or loads its own compressed-tensors copy) trains once without a
pause and once killed (SIGKILL) after its first checkpoint and resumed in a new process with empty caches of compiled
kernels, as on another machine. Compared are the adapter's bits, what TensorBoard shows of validations and training, and
the merged weights that `qerl export` writes. `--devices 0 1` runs the two modes at once, each on a GPU of its own.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
ENGINES = {"vllm": "qerl_pl.engines.VLLMEngine", "transformers": "qerl_pl.engines.TransformersEngine"}
CURVES = ("val/pass@1", "val/accuracy", "reward/mean", "policy/entropy", "mismatch/logprob_abs_mean")
ENDS = {"held-out pass@1": ("accuracy_before", "accuracy_after"), "reward": ("reward_first", "reward_last")}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def command(run: Path, share: bool, args: argparse.Namespace) -> list[str]:
    """The quickstart on this device and engine, into `run`."""
    words = [sys.executable, "-m", "qerl_pl", "fit", "-c", str(ROOT / "configs" / "quickstart.yaml"), "--resume=auto"]
    words += ["--model.policy.dtype=bfloat16", f"--trainer.accelerator={args.accelerator}"]
    words += [f"--trainer.default_root_dir={run}", f"--trainer.max_steps={args.rollouts}"]
    words += [f"--trainer.val_check_interval={args.rollouts // 2}"]
    words += [f"--checkpoint.every_n_rollouts={args.every}", "--trainer.enable_progress_bar=false"]
    words += [f"--rollout.engine={ENGINES[args.engine]}"]
    return words + ([f"--rollout.engine.share_weights={str(share).lower()}"] if args.engine == "vllm" else [])


def train(words: list[str], environment: dict[str, str]) -> float:
    """Seconds of a run that is left alone."""
    start = time.perf_counter()
    subprocess.run(words, check=True, env=environment)
    return time.perf_counter() - start


def train_killed(words: list[str], environment: dict[str, str], run: Path) -> float:
    """Seconds of a run that is killed some time after its first checkpoint, and goes on in a new process."""
    start = time.perf_counter()
    process = subprocess.Popen(words, env=environment)
    while process.poll() is None and not list(run.glob("checkpoints/step=*.ckpt")):
        time.sleep(0.02)
    time.sleep(0.3)  # into a later rollout
    if process.poll() is not None:
        raise SystemExit(f"the run ended before it could be killed, with status {process.returncode}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run(words, check=True, env=environment | {name: f"{empty}/{name}" for name in CACHES})
    return time.perf_counter() - start


def outcome(run: Path) -> dict[str, Any]:
    """What a run has made."""
    merged = run / "merged"
    subprocess.run([sys.executable, "-m", "qerl_pl", "export", str(run), str(merged), "--merge", "true"], check=True)
    events = EventAccumulator(str(run))
    events.Reload()
    curves = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in CURVES}
    summary = json.loads((run / "summary.json").read_text())
    del summary["run_dir"]
    return {
        "summary": summary,
        "adapter": load_file(run / "adapter" / "adapter_model.safetensors"),
        "merged": hashlib.sha256((merged / "model.safetensors").read_bytes()).hexdigest(),
        "curves": curves,
    }


def compare(name: str, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """How two outcomes differ."""
    pairs = [(first["adapter"][key], second["adapter"][key]) for key in first["adapter"]]
    return {
        "runs": name,
        "adapter_bits": all(torch.equal(a, b) for a, b in pairs),
        "adapter_difference": max((a - b).abs().max().item() for a, b in pairs),
        "merged_bytes": first["merged"] == second["merged"],
        "curves": first["curves"] == second["curves"],
    }


def trained(share: bool, device: str | None, args: argparse.Namespace) -> dict[str, tuple[float, dict[str, Any]]]:
    """Seconds and outcome of a mode's two runs, by name, one after the other."""
    environment = dict(os.environ) if device is None else {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    found = {}
    for killed in (False, True):
        name = f"{'borrowed' if share else 'own'}, {'killed and resumed' if killed else 'not stopped'}"
        run = args.folder / name.replace(", ", "-").replace(" ", "-")
        words = command(run, share, args)
        seconds = train_killed(words, environment, run) if killed else train(words, environment)
        found[name] = seconds, outcome(run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--devices", nargs=2, help="two GPUs by number, one for each mode")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="rollouts between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("runs/one_copy"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    with ThreadPoolExecutor(2 if args.devices else 1) as pool:
        pairs = list(pool.map(trained, (True, False), args.devices or (None, None), (args, args)))
    runs, rows = pairs[0] | pairs[1], []
    for name, (seconds, found) in runs.items():
        ends = [f"{found['summary'][a]:.3f} → {found['summary'][b]:.3f}" for a, b in ENDS.values()]
        mismatch = max(found["curves"]["mismatch/logprob_abs_mean"].values())
        rows.append([name, f"{seconds:.0f}", *ends, f"{mismatch:.1e}"])
    outcomes, names = {name: found for name, (_, found) in runs.items()}, list(runs)
    compared = [
        compare(f"{names[a]} / {names[b]}", outcomes[names[a]], outcomes[names[b]]) for a, b in ((0, 1), (2, 3), (0, 2))
    ]
    text = report.markdown(["run", "s, starts included", *ENDS, "largest mismatch, nats"], rows)
    headers = ["runs", "adapter equal to the bit", "largest difference", "merged weights equal", "curves equal"]
    text += "\n\n" + report.markdown(headers, [[*row.values()] for row in compared])
    details = {name: {k: v for k, v in one.items() if k != "adapter"} for name, one in outcomes.items()}
    report.write(args.out, f"one_copy_{args.engine}_{args.accelerator}", text, {"compared": compared, "runs": details})


if __name__ == "__main__":
    main()
