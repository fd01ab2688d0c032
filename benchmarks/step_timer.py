"""What the processes of `step_against.py` share; nothing of this package, which Unsloth's process does without."""

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch

PARTS = {  # label, file, base
    "ours-nvfp4": ("qerl_pl, NVFP4", "step_ours.py", "nvfp4"),
    "ours-mxfp4": ("qerl_pl, MXFP4", "step_ours.py", "mxfp4"),
    "ours-nf4": ("qerl_pl, NF4", "step_ours.py", "nf4"),
    "ours-16": ("qerl_pl, BF16", "step_ours.py", "bf16"),
    "ours-full": ("qerl_pl, BF16, full", "step_ours.py", "bf16"),
    "trl": ("TRL, BF16", "step_peers.py", "bf16"),
    "trl-sleep": ("TRL, BF16, vLLM asleep in the update", "step_peers.py", "bf16"),
    "unsloth": ("Unsloth, BF16", "step_peers.py", "bf16"),
}


class StepTimer:
    """Seconds of each step and the GPU's largest memory in use by phase, written after every step that counts.

    Args:
        warmup: Steps that do not count, before the others.
        out: JSON file.
    """

    def __init__(self, warmup: int, out: Path) -> None:
        self.warmup, self.out, self.phase = warmup, out, "rollout"
        self.found: dict[str, Any] = {"seconds": [], "phases": []}
        self._peaks: dict[str, float] = {}
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._sample, daemon=True)
        self._watcher.start()

    def _sample(self) -> None:
        while torch.cuda.is_available() and not self._stop.is_set():
            free, total = torch.cuda.mem_get_info()
            self._peaks[self.phase] = max(self._peaks.get(self.phase, 0.0), (total - free) / 2**30)
            time.sleep(0.02)

    def begin(self) -> None:
        """The first step begins now."""
        self.last = self.now()

    def step(self, phases: dict[str, float]) -> None:
        """A step has ended; the next one begins with its rollout."""
        now = self.now()
        if self.warmup > 0:
            self.warmup -= 1
            self._peaks = {}
        else:
            self.found["seconds"].append(now - self.last)
            self.found["phases"].append(phases)
            self.found["peak_gib"] = dict(self._peaks)
            self.out.write_text(json.dumps(self.found))
        self.last, self.phase = now, "rollout"

    def end(self) -> None:
        """Stop watching: a thread that is inside the driver when Python ends aborts the process."""
        self._stop.set()
        self._watcher.join()

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def size_of(text: str) -> tuple[int, int, int]:
    """Prompts, completions of each and their tokens, of "16x8x2048"."""
    prompts, group, tokens = map(int, text.split("x"))
    return prompts, group, tokens


def parsed(description: str | None = None) -> argparse.Namespace:
    """The arguments, which the parent passes on to the parts, with each part's own at the end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", help="of random_model.SHAPES or MIXTURES")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["ours-nvfp4", "ours-16", "trl", "unsloth"])
    parser.add_argument("--sizes", nargs="+", default=["16x8x2048", "4x8x512"], help="prompts, completions, tokens")
    parser.add_argument("--engine", default="VLLMEngine", help="ours")
    parser.add_argument("--adapter", nargs="+", default=[""], help="of our engine; by default its own")
    parser.add_argument("--awake", action="store_true", help="ours keeps its cache in the update, as the others do")
    parser.add_argument("--share-prompts", action="store_true", help="ours computes a prompt once in the update")
    parser.add_argument("--checkpointing", default="auto", help="gradient_checkpointing of ours")
    parser.add_argument("--copies", type=int, choices=(1, 2), default=1, help="of the base, in ours")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--targets", nargs="+", help="LoRA's linears in ours; by default all")
    parser.add_argument("--replay-routing", action="store_true", help="of a mixture of experts, in ours")
    parser.add_argument("--sequences", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--own-sequences", type=int, help="of ours, where it is another number")
    parser.add_argument("--steps", type=int, default=2, help="that count")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them; ours has one more")
    parser.add_argument("--kv-gib", type=float, help="by default what a step needs")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a process")
    parser.add_argument("--site", nargs="+", default=[], help="PART=FOLDER: packages of that part alone")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()
