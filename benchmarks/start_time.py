"""Seconds from `qerl fit` to the end of the first rollout, by phase: a first start, and `--resume auto` after it.

    python benchmarks/start_time.py --shape 7b --out results
    python benchmarks/start_time.py --shape tiny --device cpu --out results  # by vLLM's CPU build

The model has random NVFP4 weights (written once, below --base). Each start is a process of its own, timed from its
creation. The first has empty caches of vLLM, Triton and PyTorch's compiler (in --out/start_caches, removed before),
takes a step and saves a checkpoint; each later one (--starts) goes on from the last and takes another. Indented phases
are part of the one above. The processor's seconds are those of this process alone, and of all its threads.
"""

import argparse
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import random_model
import report
import torch
import yaml
from qerl_kernels import select_backend

PHASES = {
    "imports": "Python and the command line's imports",
    "configured": "configuration, data, trainer",
    "base": "model folder: format, cache, checks",
    "launch": "engine",
    "vllm": "  imports of vLLM",
    "names": "  check of vLLM's names, imports of its workers",
    "settings": "  vLLM's configuration, with its inspection of the model",
    "device": "  device and process group",
    "load": "  weights",
    "profile": "  profiling pass, with compilation",
    "graphs": "  warm-up and CUDA graphs",
    "policy": "the trainer's model and adapter",
    "identity": "digest of the base",
    "checkpoint": "checkpoint read",
    "rollout": "rollout",
    "parity": "  parity check",
}
"""What is timed, in the order of the table; what is left of the whole is the last row but one."""


def timed(
    owner: Any, name: str, phase: str, seconds: dict[str, float], after: Callable[[], None] | None = None
) -> None:
    """Add the seconds of a function's calls to a phase.

    Args:
        owner: A class or module.
        name: Of the function.
        phase: Of `PHASES`.
        seconds: By phase.
        after: Called after each call.
    """
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def measured(*arguments: Any, **settings: Any) -> Any:
        start = time.perf_counter()
        try:
            result = function(*arguments, **settings)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        if after is not None:
            after()
        return result

    setattr(owner, name, measured)


def age() -> float:
    """Seconds since this process was created."""
    return time.time() - psutil.Process().create_time()


def configuration(args: argparse.Namespace, base: Path, run: Path) -> dict[str, Any]:
    """Of a run of one prompt a step, without validation."""
    on_gpu = args.device == "cuda"
    engine = {"kv_cache_gib": 4.0 if on_gpu else 0.1, "max_num_seqs": 64}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {"path": str(base), "dtype": "bfloat16", "lora": {"rank": 32, "alpha": 32.0}},
            "monitor_kl": False,
        },
        "data": {
            "class_path": "qerl_pl.datamodules.ArithmeticDataModule",
            "init_args": {"train_size": 16, "batch_size": 1, "val_size": 0},
        },
        "rollout": {
            "engine": {"class_path": "qerl_pl.engines.VLLMEngine", "init_args": engine},
            "group_size": 8,
            "sampling": {"max_tokens": args.tokens},
            "rewards": {"spread": "rl_step.Spread"},
            "mismatch_bound": 1.0,  # random weights: nothing to compare with
        },
        "best": None,
        "summary": None,
        "trainer": {
            "default_root_dir": str(run),
            "accelerator": "gpu" if on_gpu else "cpu",
            "devices": 1,
            "max_epochs": 1,
            "enable_progress_bar": False,
        },
    }


def functions() -> list[tuple[Any, str, str]]:
    """(class or module, name of the function, phase) that are timed, but for those of vLLM itself."""
    from qerl_pl.engines.vllm import compat, engine, worker
    from qerl_pl.modules import policy_module
    from qerl_pl.modules.policy import PolicyConfig
    from qerl_pl.persistence.checkpoint_io import AtomicCheckpointIO
    from qerl_pl.rollout import collector

    return [
        (PolicyConfig, "base_folder", "base"),
        (engine.VLLMEngine, "launch", "launch"),
        (engine, "import_vllm", "vllm"),
        (compat, "check_names", "names"),
        (worker.PolicyWorker, "init_device", "device"),
        (worker.PolicyWorker, "load_model", "load"),
        (worker.PolicyWorker, "compile_or_warm_up_model", "graphs"),
        (policy_module, "Policy", "policy"),
        (policy_module, "folder_identity", "identity"),
        (AtomicCheckpointIO, "load_checkpoint", "checkpoint"),
        (collector, "check_logprob_parity", "parity"),
    ]


def start(told: dict[str, Any]) -> None:
    """In the process of a start: run, and time what it does up to the end of the first rollout."""
    from qerl_pl.cli.main import QeRLCLI, main
    from qerl_pl.engines.vllm import engine, worker
    from qerl_pl.rollout.collector import Collector

    seconds, out = {"imports": age()}, Path(told["times"])
    load = engine.import_vllm

    def import_vllm() -> None:
        """With the imports that vLLM leaves to the first use."""
        load()
        timed(importlib.import_module("vllm").LLM, "__init__", "llm", seconds)
        arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        timed(arguments, "create_engine_config", "settings", seconds)

    def profiled(self: Any) -> Any:
        return super(worker.PolicyWorker, self).determine_available_memory()  # type: ignore[misc]

    def configured() -> None:
        seconds["configured"] = age() - seconds["imports"] - seconds.get("base", 0.0)

    def done() -> None:
        if not out.exists():  # the first rollout
            out.write_text(json.dumps(seconds | {"whole": age(), "process": time.process_time()}))

    engine.import_vllm = import_vllm
    worker.PolicyWorker.determine_available_memory = profiled  # type: ignore[attr-defined]
    for owner, name, phase in [*functions(), (worker.PolicyWorker, "determine_available_memory", "profile")]:
        timed(owner, name, phase, seconds)
    timed(Collector, "collect", "rollout", seconds, done)
    timed(QeRLCLI, "instantiate_classes", "built", seconds, configured)
    sys.exit(main(["fit", "-c", told["config"], "--trainer.max_steps", str(told["steps"]), "--resume", "auto"]))


def measure(args: argparse.Namespace, base: Path) -> list[dict[str, float]]:
    """Seconds by phase of each start."""
    run, caches = args.out / "start_run", (args.out / "start_caches").resolve()
    for folder in (run, caches):
        shutil.rmtree(folder, ignore_errors=True)
    config = args.out / "start_time.yaml"
    config.write_text(yaml.safe_dump(configuration(args, base, run)))
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    environment = os.environ | {name: str(caches / name.lower()) for name in names}
    found = []
    for number in range(1, args.starts + 1):
        times, log = args.out / "start_times.json", args.out / f"start_{number}.log"
        times.unlink(missing_ok=True)
        told = json.dumps({"config": str(config), "times": str(times), "steps": number})
        command = [sys.executable, __file__, "--out", str(args.out), "--one", told]
        with log.open("w") as file:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
        if not times.exists():
            raise SystemExit(f"start {number} did not get to its first rollout: see {log}")
        found.append(json.loads(times.read_text()))
        write(found, args)
    return found


def write(found: list[dict[str, float]], args: argparse.Namespace) -> None:
    """The table, a column for each start; phases that are not indented and the rest are the whole."""
    headers = ["seconds of", "first start", *(f"start {number}, resumed" for number in range(2, len(found) + 1))]
    rows = [[text, *(f"{one.get(name, 0.0):.2f}" for one in found)] for name, text in PHASES.items()]
    parts = [name for name, text in PHASES.items() if not text.startswith(" ")]
    rest = [one["whole"] - sum(one.get(name, 0.0) for name in parts) for one in found]
    rows.append(["the rest", *(f"{seconds:.2f}" for seconds in rest)])
    rows.append(["**to the end of the first rollout**", *(f"**{one['whole']:.2f}**" for one in found)])
    rows.append(["processor", *(f"{one['process']:.2f}" for one in found)])
    report.write(args.out, f"start_time_{args.shape}", report.markdown(headers, rows), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="most of a completion, of 8")
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        start(json.loads(args.one))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    base = args.base / f"{args.shape}-nvfp4"
    if not base.is_dir():
        if args.device == "cuda":
            select_backend("triton")
        random_model.write_model(base, args.shape, torch.device(args.device))
    measure(args, base)


if __name__ == "__main__":
    main()
