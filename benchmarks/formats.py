"""Every base format, and full fine-tuning: rollout and update speed and peak memory, and what the toy policy learns.

    python benchmarks/formats.py --out DIR                               # one H200, about eight minutes
    python benchmarks/formats.py --parts nf4 full --what speed --out DIR # some, into the same table
    python benchmarks/formats.py --shape tiny --device cpu --parts nvfp4 full --batches 2 4 --tokens 8 --group 4 \
        --rollouts 2 --no-tests --out DIR                                # does it run?

`speed`: three steps (a prompt, --group completions) and then rollouts of --batches, with random weights of --shape.
`task`: the quickstart in bfloat16 with VLLMEngine and noise. Each part has a process of its own. Their engines start
at once; then one after the other loads its policy and is measured while those that wait are idle (those of `task` run
together). Results are written as they come; what would begin after --minutes is left out. NF4 in vLLM and full
fine-tuning need bitsandbytes.
Memory is what the driver counts for the whole GPU in a full step, sampled every 20 ms, less what the other processes
held, which is what is left when a part has ended.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

ROOT = Path(__file__).parents[1]
GATE = ("tests/test_ops_triton.py",)
FOUR_BITS = ("nvfp4", "mxfp4", "nf4")
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "nvfp4": ("NVFP4 + LoRA", {"quantization": "nvfp4"}),
    "mxfp4": ("MXFP4 + LoRA", {"quantization": "mxfp4"}),
    "nf4": ("NF4 + LoRA (QLoRA)", {"quantization": "nf4"}),
    "none": ("BF16 + LoRA", {"quantization": "none"}),
    "full": ("BF16, full", {"quantization": "none", "finetune": "full"}),
}
PAPER = {"nvfp4": 1.27, "nf4": 0.83, "none": 1.0}
"""Rollout speed at batch 8 over that of 16-bit LoRA, 7B on an H100 (arXiv 2510.11696)."""
RATES = {"speed": 1e-6, "task": 2e-4}
"""Of full fine-tuning."""


class Turn(Callback):
    """Waits, between the start of the engine and the loading of the policy.

    Args:
        path: File that says go on.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def setup(self, *_: Any, **__: Any) -> None:
        self.path.with_suffix(".ready").touch()
        while not self.path.exists():
            time.sleep(0.1)


class Speed(Callback):
    """Measures rollouts by the run's engine, once it has trained and before it is closed.

    Args:
        asked: What `engine_h200.measure_speed` needs to know.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = argparse.Namespace(**asked)
        self.rows: list[dict[str, Any]] = []

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import engine_h200

        from qerl_pl.callbacks.rollout import rollout_callback

        engine = rollout_callback(trainer, "Speed").engine
        engine.wake()
        self.rows = engine_h200.measure_speed(engine, self.asked)


def base_of(args: argparse.Namespace, part: str) -> Path:
    folder: Path = args.base / args.shape
    return folder / (part if part in FOUR_BITS else "bf16")


def prepare(args: argparse.Namespace) -> None:
    """The tests of what is new here, models of random weights, and the toy policy."""
    import random_model
    import torch
    from qerl_kernels import select_backend
    from report import correct

    from qerl_pl.formats.quantize import quantize_checkpoint
    from qerl_pl.toy.policy import ToyConfig, build_toy_policy

    if not args.no_tests and not correct(GATE):
        sys.exit("a kernel is wrong: nothing is timed")
    source, device = base_of(args, "none"), torch.device(args.device)
    if "task" in args.what:
        build_toy_policy(ToyConfig())
    if "speed" not in args.what:
        return
    if device.type == "cuda":
        select_backend("triton")
    if not source.is_dir():
        random_model.write_model(source, args.shape, device, nvfp4=False)
    for part in set(args.parts) & set(FOUR_BITS):
        if not base_of(args, part).is_dir():
            quantize_checkpoint(source, base_of(args, part), part, device=args.device)


def changed(settings: dict[str, Any], part: str, what: str, device: str) -> dict[str, Any]:
    """A run's settings with this part's format."""
    settings["model"]["policy"] |= {"dtype": "bfloat16"} | PARTS[part][1]
    if part == "full":
        name = "bitsandbytes.optim.AdamW8bit" if device == "cuda" else "torch.optim.AdamW"
        settings["model"]["optimizer"] = {"class_path": name, "init_args": {"lr": RATES[what]}}
    settings["trainer"]["accelerator"] = "gpu" if device == "cuda" else "cpu"
    return settings


def speed(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """Three steps, and rollouts by the same engine after them."""
    import rl_step

    from qerl_pl.callbacks import RolloutCallback
    from qerl_pl.cli.main import QeRLCLI

    given = {"kv_gib": args.kv_gib, "group": args.group, "copies": 1, "eager": False, "tokens": args.tokens, "steps": 3}
    given |= {"precision": "", "micro_batch_tokens": 4608, "out": args.out / f"formats-{part}"}
    settings = changed(rl_step.settings(argparse.Namespace(**given), base_of(args, part)), part, "speed", args.device)
    engine = settings["trainer"]["callbacks"][0]["init_args"]["engine"]["init_args"]
    engine |= {"max_num_seqs": max(args.batches), "prefix_caching": False}
    turn = {"class_path": "formats.Turn", "init_args": {"path": str(args.out / f".speed-{part}.go")}}
    asked = {name: getattr(args, name) for name in ("device", "shape", "batches", "tokens")}
    measured = {"class_path": "formats.Speed", "init_args": {"asked": asked | {"prompt": 64, "repeats": 2}}}
    settings["trainer"]["callbacks"][1:1] = [turn, measured]
    sys.argv = sys.argv[:1]
    cli = QeRLCLI({"subcommand": "fit", "fit": settings})
    memory = next(one for one in cli.trainer.callbacks if type(one).__name__ == "DriverMemory")
    (rollout,) = (one for one in cli.trainer.callbacks if isinstance(one, RolloutCallback))
    steps = memory.steps[1:]
    names = ("time/sync_s", "time/rollout_s", "time/update_s")
    median = {name: statistics.median(step[name] for step in steps) for name in names}
    result = {
        "median": median,
        "steps": memory.steps,
        "peak_gib": max((memory.peaks.get(phase, 0.0) for phase in ("rollout", "update")), default=0.0),
        "update_tokens_per_s": args.group * args.tokens / median["time/update_s"],
        "kernels": rollout.engine.kernels,
    }
    # The YAML names the class by its module, which is another one than __main__.
    result["speed"] = next(one for one in cli.trainer.callbacks if type(one).__name__ == Speed.__name__).rows
    return result


def task(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """The quickstart's curve, and the accuracy before and after."""
    import yaml

    from qerl_pl.callbacks import RolloutCallback
    from qerl_pl.cli.main import QeRLCLI

    settings = changed(yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()), part, "task", args.device)
    settings["data"]["init_args"]["train_size"] = 16 * args.rollouts
    settings["trainer"] |= {"default_root_dir": str(args.out / f"formats-task-{part}"), "enable_progress_bar": False}
    settings["trainer"]["val_check_interval"] = args.rollouts
    engine = {"kv_cache_gib": 1.0, "enforce_eager": True, "sleep_mode": False}  # vLLM measures the whole GPU
    settings["rollout"]["engine"] = {"class_path": "qerl_pl.engines.VLLMEngine", "init_args": engine}
    settings |= dict.fromkeys(("best", "checkpoint", "monitor", "completions"))
    sys.argv = sys.argv[:1]
    cli = QeRLCLI({"subcommand": "fit", "fit": settings})
    (rollout,) = (one for one in cli.trainer.callbacks if isinstance(one, RolloutCallback))
    found: dict[str, Any] = json.loads((args.out / f"formats-task-{part}" / "summary.json").read_text())
    del found["run_dir"]  # of this machine
    return found | {"kernels": rollout.engine.kernels}


def tables(found: dict[str, dict[str, Any]], batches: list[int]) -> str:
    """What is there so far, as Markdown."""
    import report

    text, speeds = [], {part: one for part, one in found.items() if "speed" in one}
    rates = {p: {row["batch"]: row["rollout_tokens_per_s"] for row in one["speed"]} for p, one in speeds.items()}
    rows = []
    for part, one in speeds.items():
        over = [f"{rates[part][b] / rates['none'][b]:.2f}" if "none" in rates else "–" for b in batches]
        cells = [f"{rates[part][b]:.0f} ({ratio})" for b, ratio in zip(batches, over, strict=True)]
        median = one["median"]
        row = [PARTS[part][0], *cells, PAPER.get(part, "–"), f"{one['update_tokens_per_s']:.0f}"]
        rows.append([*row, f"{1e3 * median['time/sync_s']:.0f}", f"{one['peak_gib']:.1f}", ", ".join(one["kernels"])])
    headers = ["", *(f"rollout tok/s at {batch} (over BF16)" for batch in batches), "paper's ratio at 8"]
    if rows:
        text.append(report.markdown([*headers, "update tok/s", "sync ms", "peak GiB of a step", "kernels"], rows))
    learned = {part: one["task"] for part, one in found.items() if "task" in one}
    if learned:
        keys = sorted({key for one in learned.values() for key, value in one.items() if isinstance(value, int | float)})
        cells = [[key, *(one.get(key, "–") for one in learned.values())] for key in keys]
        text.append(report.markdown(["toy task, bfloat16", *(PARTS[part][0] for part in learned)], cells))
    return "\n\n".join(text)


def write(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    import report

    report.write(args.out, f"formats_{args.shape}", tables(found, args.batches), found)


def measure(args: argparse.Namespace) -> None:
    """Run the parts and write what they find."""
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    earlier = args.out / f"formats_{args.shape}.json"
    found: dict[str, dict[str, Any]] = json.loads(earlier.read_text())["results"] if earlier.is_file() else {}
    jobs = [(what, part) for what in args.what for part in args.parts]
    for job in jobs:
        for kind in ("ready", "go", "json"):
            (args.out / f".{'-'.join(job)}.{kind}").unlink(missing_ok=True)
    if status := subprocess.run([*command(args), "--only", "prepare"]).returncode:
        sys.exit(status)
    children = {job: subprocess.Popen([*command(args), "--only", *job]) for job in jobs}  # they import meanwhile
    try:
        for (what, part), process in children.items():
            while what == "speed" and process.poll() is None and not (args.out / f".{what}-{part}.ready").exists():
                time.sleep(0.2)
        for what in args.what:
            for batch in [[part] for part in args.parts] if what == "speed" else [list(args.parts)]:
                if time.monotonic() - began > 60 * args.minutes:
                    print(f"out of time: {what} of {', '.join(batch)} is left out", file=sys.stderr)
                    continue
                for part in batch:
                    (args.out / f".{what}-{part}.go").touch()
                for part in batch:
                    children[what, part].wait()
                    path = args.out / f".{what}-{part}.json"
                    if path.is_file():
                        one = json.loads(path.read_text())
                        if what == "speed":
                            one["peak_gib"] = max(0.0, one["peak_gib"] - used_gib(args.device))
                        found.setdefault(part, {}).update(one if what == "speed" else {"task": one})
                    else:
                        print(f"{what} of {part} failed", file=sys.stderr)
                    write(args, found)
    finally:
        for child in children.values():
            child.kill()


def used_gib(device: str) -> float:
    """What the driver counts for all processes; asked from outside, for a process that asks it holds some itself."""
    if device != "cuda":
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def command(args: argparse.Namespace) -> list[str]:
    """This program with the same arguments."""
    return [sys.executable, str(Path(__file__)), *args.words]


def child(args: argparse.Namespace) -> None:
    """One part, when its turn comes."""
    import vllm  # noqa: F401  - slow, and done while another part has the GPU

    import qerl_pl.cli.main  # noqa: F401

    what, part = args.only
    while what == "task" and not (args.out / f".{what}-{part}.go").exists():
        time.sleep(0.2)
    result = (speed if what == "speed" else task)(args, part)
    (args.out / f".{what}-{part}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--what", nargs="+", choices=("speed", "task"), default=["speed", "task"])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64, 192])
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-formats"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.words = [word for word in sys.argv[1:]]
    os.environ.setdefault("QERL_CACHE", str(args.base / "cache"))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if args.only is None:
        measure(args)
    elif args.only == ["prepare"]:
        prepare(args)
    else:
        child(args)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "kernels")]
    main()
