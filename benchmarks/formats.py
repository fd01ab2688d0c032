"""What the toy policy learns in every base format and in full fine-tuning: the quickstart in bfloat16, with noise.

    python benchmarks/formats.py --out DIR
    python benchmarks/formats.py --device cpu --parts nvfp4 full --rollouts 2 --out DIR    # does it run?

Each part has a process of its own; they run together. NF4 in vLLM and full fine-tuning on a GPU need bitsandbytes.
Speed and memory of the formats are `step_against.py --parts ours-nvfp4 ours-mxfp4 ours-nf4 ours-16 ours-full` and
`rollout_speed.py`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
import yaml

from qerl_pl.cli.main import QeRLCLI
from qerl_pl.toy.policy import ToyConfig, build_toy_policy

PARTS = {
    "nvfp4": ("NVFP4 + LoRA", {"quantization": "nvfp4"}),
    "mxfp4": ("MXFP4 + LoRA", {"quantization": "mxfp4"}),
    "nf4": ("NF4 + LoRA (QLoRA)", {"quantization": "nf4"}),
    "none": ("BF16 + LoRA", {"quantization": "none"}),
    "full": ("BF16, full", {"quantization": "none", "finetune": "full"}),
}


def train(args: argparse.Namespace, part: str) -> None:
    """The quickstart with this part's format."""
    settings: dict[str, Any] = yaml.safe_load((report.ROOT / "configs" / "quickstart.yaml").read_text())
    settings["model"]["policy"] |= {"dtype": "bfloat16"} | PARTS[part][1]
    if part == "full":
        name = "bitsandbytes.optim.AdamW8bit" if args.device == "cuda" else "torch.optim.AdamW"
        settings["model"]["optimizer"] = {"class_path": name, "init_args": {"lr": 2e-4}}
    settings["data"]["init_args"]["train_size"] = 16 * args.rollouts
    settings["trainer"] |= {"default_root_dir": str(args.out / f"formats-{part}"), "enable_progress_bar": False}
    settings["trainer"] |= {
        "accelerator": "gpu" if args.device == "cuda" else "cpu",
        "val_check_interval": args.rollouts,
    }
    engine = {"kv_cache_gib": 1.0, "enforce_eager": True, "sleep_mode": False}  # vLLM measures the whole GPU
    settings["rollout"]["engine"] = {"class_path": "qerl_pl.engines.VLLMEngine", "init_args": engine}
    settings |= dict.fromkeys(("best", "checkpoint", "monitor", "completions"))
    sys.argv = sys.argv[:1]
    QeRLCLI({"subcommand": "fit", "fit": settings})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, help="run this part in this process")
    args = parser.parse_args()
    if args.part:
        train(args, args.part)
        return 0
    build_toy_policy(ToyConfig())
    running = {part: subprocess.Popen([sys.executable, *sys.argv, "--part", part]) for part in args.parts}
    failed = [part for part, process in running.items() if process.wait()]
    found = {
        part: json.loads((args.out / f"formats-{part}" / "summary.json").read_text())
        for part in args.parts
        if part not in failed
    }
    keys = sorted({key for one in found.values() for key, value in one.items() if isinstance(value, int | float)})
    cells = [[key, *(one.get(key, "–") for one in found.values())] for key in keys]
    table = report.markdown(["toy task, bfloat16", *(PARTS[part][0] for part in found)], cells)
    report.write(args.out, "formats_task", table, found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
