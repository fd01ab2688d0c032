"""The longest completion that trains, by model and size of the card: seconds a step, peak memory beside the estimate.

    python benchmarks/context_ladder.py --update-only --snapshot --shape 8b --lengths 2048 8192 20480 --out results
    python benchmarks/context_ladder.py --shape 8b --cards 16 24 32 48 80 --out results  # steps with the engine
    python benchmarks/context_ladder.py --shape tiny --device cpu --cards 1 --lengths 64 128 --out results  # runs?
    python benchmarks/context_ladder.py --update-only --shape tiny --device cpu --lengths 64 128 --out results

The first takes about two minutes on an H200 with a model of random NVFP4 weights (written once, below --base):
the update alone, of one completion of each length, in each of --ways (`true`, `offload`, and both with MLPs in tiles of
4096 tokens): seconds, tokens/s, the peak of PyTorch's tensors beside the estimate, and bytes a token between one length
and the next. --snapshot prints which lines hold what is alive at the peak of the longest one that fits.

The second runs full steps: one prompt, 8 completions of a length, as many of them at once as the card has room for keys
and values. A card of fewer GiB is the rest of this one beside one plain allocation, which the driver counts as used:
CUDA, vLLM and CUDA graphs have to do with the rest, which `torch.cuda.set_per_process_memory_fraction` does not limit.
Each step runs in a process of its own. Lengths go up from the longest that is estimated to fit, and down if it does
not. Both write their table after every row; what was measured with the same settings is read from the file in --out and
not measured again. With --sampled 256 all but 256 of a completion's tokens are the prompt's: the memory of a long
completion in minutes, without the seconds that sampling it takes. `context_bars.py` runs single rows by name.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import random_model
import report
import torch
from qerl_kernels import select_backend
from transformers import AutoConfig

from qerl_pl.datamodules import ArithmeticDataModule
from qerl_pl.memory import GIB, SPARE_TOKENS
from qerl_pl.memory_plan import MicroBatch, RunPlan, run_memory, update_memory
from qerl_pl.model_shape import Shape

WAYS: dict[str, tuple[Any, int | None]] = {
    "true": (True, None),
    "true, tiles": (True, 4096),
    "offload": ("offload", None),
    "offload, tiles": ("offload", 4096),
}
"""gradient_checkpointing and mlp_tile_tokens."""
GROUP = 8
"""Completions of a prompt in the estimate, and in a step unless `--group` says fewer."""
PROMPT = 64
"""Tokens of a prompt, at most."""
PREFILL = 2048
"""Most tokens of the engine's forward pass; at its start it runs so many."""
POSITIONS = 163840
SETTINGS = ("checkpointing", "tile", "rank", "kv_dtype", "state_bits", "sampled", "steps", "eager", "group")
"""Of a row of full steps: a row with others is measured again."""
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "must fit on the GPU", "No available memory", "Free memory on")
"""What a process says whose step does not fit: PyTorch's, CUDA's and vLLM's words. Anything else is a mistake."""
EIGHT_BITS = {"class_path": "bitsandbytes.optim.AdamW8bit", "init_args": {"lr": 1e-6}}
LENGTHS = (512, 1024, 2048, 4096, 8192, 12288, 16384, 20480, 32768, 49152, 65536, 98304, 131072)


def base_of(args: argparse.Namespace) -> Path:
    """The model of random weights, written where it is not there yet."""
    folder: Path = args.base / f"{args.shape}-long-nvfp4"
    if not folder.is_dir():
        # In a subprocess: the driver would count the 0.6 GiB of a CUDA context in this process as memory of the steps.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(write_base, folder, args.shape, args.device).result()
    return folder


def write_base(folder: Path, shape: str, device: str) -> None:
    """Write the model of random weights."""
    if device == "cuda":
        select_backend("triton")
    random_model.write_model(folder, shape, torch.device(device), positions=POSITIONS)


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape.of(AutoConfig.for_model(**random_model.config_of(args.shape, POSITIONS)))


# The update alone -----------------------------------------------------------------------------------------------------


def update_plan(args: argparse.Namespace, way: str, length: int) -> RunPlan:
    mode, tile = WAYS[way]
    batch = MicroBatch(length, 1, checkpointing=mode, mlp_tile_tokens=tile, rank=args.rank)
    return RunPlan(shape_of(args), batch, engine=False)


def policy_of(args: argparse.Namespace, way: str) -> Any:
    """The policy that trains in a way."""
    from qerl_pl.modules import LoraConfig, Policy, PolicyConfig

    mode, tile = WAYS[way]
    lora, base = LoraConfig(rank=args.rank, alpha=float(args.rank)), base_of(args)
    config = PolicyConfig(path=str(base), lora=lora, gradient_checkpointing=mode, mlp_tile_tokens=tile)
    return Policy(base, config, torch.device(args.device), seed=0).train()


def free_memory(args: argparse.Namespace) -> None:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


def updates(args: argparse.Namespace) -> None:
    """Measure every length in every way; writes after each. What is alive at the peak comes last."""
    import update_speed

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the command line does
    vocabulary = shape_of(args).vocabulary
    found = updates_so_far(args)
    for way in args.ways:
        missing = [length for length in sorted(args.lengths) if length not in found.setdefault(way, {})]
        policy = policy_of(args, way) if missing else None
        for length in missing:
            try:
                one = update_speed.measure(policy, length, length, vocabulary, args.repeats)
            except torch.OutOfMemoryError:
                break
            found[way][length] = one | {"estimate_gib": update_memory(update_plan(args, way, length)) / GIB}
            write_updates(found, {}, args)
        del policy
        free_memory(args)
    write_updates(found, {}, args)
    alive: dict[str, Any] = {}
    for way in args.ways if args.snapshot and args.device == "cuda" else ():
        policy = policy_of(args, way)
        alive[way] = alive_at_peak(policy, max(found[way]), vocabulary)
        write_updates(found, alive, args)
        del policy
        free_memory(args)


def updates_so_far(args: argparse.Namespace) -> dict[str, dict[int, dict[str, float]]]:
    """What an earlier run has measured with this rank."""
    path = args.out / f"context_update_{args.shape}.json"
    results = json.loads(path.read_text())["results"] if path.is_file() else {}
    found = results.get("found", {}) if results.get("rank") == args.rank else {}
    return {way: {int(length): one for length, one in lengths.items()} for way, lengths in found.items()}


def write_updates(
    found: dict[str, dict[int, dict[str, float]]], alive: dict[str, Any], args: argparse.Namespace
) -> None:
    rows: list[list[Any]] = []
    for way, measured in found.items():
        before: tuple[int, float] | None = None
        for length, one in sorted(measured.items()):
            peak, estimate = one["peak_gib"], one["estimate_gib"]
            token = "–" if before is None else f"{(peak - before[1]) * GIB / (length - before[0]):.0f}"
            apart = f"{100 * (estimate / peak - 1):+.1f}" if peak else "–"
            speed = f"{one['tokens_per_s']:.0f}"
            rows.append([way, length, f"{one['seconds']:.2f}", speed, f"{peak:.2f}", f"{estimate:.2f}", apart, token])
            before = length, peak
    headers = ["way", "tokens", "s an update", "tokens/s", "peak GiB", "estimate GiB", "apart %", "bytes a token"]
    tables = [report.markdown(headers, rows)]
    for way, lines in alive.items():
        tables.append(report.markdown([f"alive at the peak, {way}", "GiB"], [[k, f"{v:.3f}"] for k, v in lines]))
    results = {"shape": args.shape, "rank": args.rank, "found": found, "alive": alive}
    report.write(args.out, f"context_update_{args.shape}", "\n\n".join(tables), results)


def alive_at_peak(policy: Any, length: int, vocabulary: int) -> list[tuple[str, float]]:
    """GiB of what one update allocates and has at its peak, by the lines that allocated it, largest first."""
    import update_speed

    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=2_000_000, stacks="python")
    try:
        update_speed.measure(policy, length, length, vocabulary, 1)
        events = memory._snapshot()["device_traces"][0]
    finally:
        memory._record_memory_history(enabled=None)
    held: dict[int, tuple[int, str]] = {}
    now = peak = 0
    at_peak: dict[int, tuple[int, str]] = {}
    last: int | None = None
    for index, event in enumerate(events):  # the peak first, then what is alive there
        now += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if now > peak:
            peak, last = now, index
    for event in events[: 0 if last is None else last + 1]:
        if event["action"] == "alloc":
            held[event["addr"]] = event["size"], _place(event["frames"])
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    at_peak = dict(held)
    sizes: Counter[str] = Counter()
    for size, place in at_peak.values():
        sizes[place] += size
    return [(place, size / GIB) for place, size in sizes.most_common(20)]


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost lines of this project that a frame list has."""
    own = [frame for frame in frames if "qerl" in frame["filename"] or "transformers/models" in frame["filename"]]
    return " < ".join(f"{Path(frame['filename']).name}:{frame['line']}" for frame in own[:3]) or "backward pass"


# Full steps -----------------------------------------------------------------------------------------------------------


def step_plan(args: argparse.Namespace, length: int, kv: float) -> RunPlan:
    batch = MicroBatch(length + PROMPT, 1, checkpointing=args.checkpointing, mlp_tile_tokens=args.tile, rank=args.rank)
    prompt = GROUP * (PROMPT if args.sampled is None else PROMPT + length)
    return RunPlan(
        shape_of(args),
        batch,
        micro_batches=GROUP,
        kv_cache_gib=kv,
        kv_dtype=torch.float8_e4m3fn if args.kv_dtype == "fp8" else None,
        prompt_tokens=prompt,
        prefill_tokens=PREFILL,
        max_num_seqs=GROUP,
        **{"state_bytes": 2.03125, "step_bytes": 0.0} if args.state_bits == 8 else {},
    )


def sequence_gib(args: argparse.Namespace, length: int) -> float:
    """GiB of a cache for one sequence."""
    return step_plan(args, length, 0.0).sequence_kv_bytes(length + PROMPT + SPARE_TOKENS) / GIB


def kv_for(args: argparse.Namespace, card: float, length: int) -> float:
    """GiB for keys and values: of 8 completions, or what a card has room for; 0 where not even one fits."""
    sequence = sequence_gib(args, length)
    plan = step_plan(args, length, 0.0)
    room = card - args.margin - sum(run_memory(plan).rollout.values()) / GIB
    return min(GROUP * sequence, room) if room >= sequence else 0.0


def fits(args: argparse.Namespace, card: float, length: int) -> bool:
    """Whether a step of this length is estimated to fit."""
    kv = kv_for(args, card, length)
    return kv > 0 and run_memory(step_plan(args, length, kv)).peak / GIB <= card - args.margin


def ladder(args: argparse.Namespace) -> None:
    """Steps of growing length on each card; goes on where it was cut off."""
    base_of(args)
    path, began = args.out / f"context_ladder_{args.shape}.json", time.monotonic()
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"] if path.is_file() else {}
    for card in args.cards:
        lengths, settings = sorted(args.lengths), settings_of(args)
        # Rows that were measured with other settings are not of this table.
        known = {name: one for name, one in found.get(f"{card:g}", {}).items() if one.get("settings") == settings}
        found[f"{card:g}"] = known
        first = max((index for index, length in enumerate(lengths) if fits(args, card, length)), default=0)
        index = first
        while 0 <= index < len(lengths):
            length = lengths[index]
            if str(length) not in known:
                if time.monotonic() - began > args.minutes * 60:
                    return
                measured = step(args, card, length)
                if measured.get("outcome") == "failed":
                    raise SystemExit(f"a step of {length} tokens on {card:g} GiB failed: {measured['reason']}")
                known[str(length)] = measured | {"settings": settings}
                write_ladder(found, args)
            up = known[str(length)]["fits"]
            following = index + (1 if up else -1)
            neighbour = known.get(str(lengths[following])) if 0 <= following < len(lengths) else None
            if neighbour is not None and neighbour["fits"] is not up:
                break
            index = following
    write_ladder(found, args)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What a row was measured with."""
    return {name: getattr(args, name) for name in SETTINGS}


def step(args: argparse.Namespace, card: float, length: int) -> dict[str, Any]:
    """Steps of one length in a process of its own: what it measured, or that it does not fit, and why."""
    kv = max(kv_for(args, card, length), sequence_gib(args, length))
    estimate = run_memory(step_plan(args, length, kv))
    told = {"card": card, "length": length, "kv": kv, **settings_of(args)}
    told |= {"shape": args.shape, "device": args.device, "base": str(args.base), "out": str(args.out)}
    out = args.out / "step.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(args.out), "--one", json.dumps(told)]
    log = args.out / f"step_{args.shape}_{card:g}_{length}.log"
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=args.limit, check=False)
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {args.limit:g} s\n")
    rows = [[name, round(rollout, 3), round(update, 3)] for name, rollout, update in estimate.table()]
    common = {"estimate_gib": estimate.peak / GIB, "estimate": rows, "kv_gib": kv}
    if out.is_file():
        return {"fits": True, **json.loads(out.read_text()), **common}
    text = log.read_text()
    lines = [line for line in text.splitlines() if "memory" in line.lower() or line.startswith("stopped after")]
    outcome = "too slow" if "\nstopped after" in text else "does not fit"
    if not lines or (outcome == "does not fit" and not any(word in text for word in OUT_OF_MEMORY)):
        outcome = "failed"
    return {"fits": False, "outcome": outcome, "reason": (lines or [f"see {log}"])[-1][:300], **common}


class LongPrompts(ArithmeticDataModule):
    """Prompts of so many tokens that they and what is sampled are as long as a completion.

    Args:
        tokens: Of a prompt, about: each digit is one.
        train_size: Prompts.
    """

    def __init__(self, tokens: int, train_size: int) -> None:
        super().__init__(train_size=train_size, batch_size=1, val_size=0, max_prompt_tokens=tokens, system_prompt=None)
        self.tokens = tokens

    def problem(self, index: int, split: Any) -> tuple[str, str]:
        return str(index % 10) * (self.tokens - 8), "0"  # roles and the first token besides


def one_step(told: dict[str, Any]) -> None:
    """In the process of a step: hold the rest of the card, run, write what was measured."""
    import rl_step

    from qerl_pl.cli.main import QeRLCLI

    args = argparse.Namespace(**told | {"base": Path(told["base"]), "out": Path(told["out"])})
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu, held, rest = args.device == "cuda", 0, None
    if on_gpu:
        select_backend("triton")
        held = max(int(torch.cuda.mem_get_info()[1] - told["card"] * GIB), 0)
        rest = torch.empty(held, dtype=torch.uint8, device="cuda")
    given = {"kv_gib": told["kv"], "group": args.group, "copies": 1, "eager": args.eager}
    sampled = min(args.sampled or told["length"], told["length"])
    given |= {"tokens": sampled}
    given |= {"precision": "nvfp4", "steps": args.steps, "micro_batch_tokens": 1, "out": args.out}
    settings = rl_step.settings(argparse.Namespace(**given), base_of(args))
    settings["model"]["policy"] |= {
        "lora": {"rank": args.rank, "alpha": float(args.rank)},
        "gradient_checkpointing": args.checkpointing,
        "mlp_tile_tokens": args.tile,
    }
    if args.state_bits == 8:
        settings["model"]["optimizer"] = EIGHT_BITS
    rollout = settings["trainer"]["callbacks"][0]["init_args"]
    settings["data"]["init_args"]["max_prompt_tokens"] = PROMPT
    if args.sampled is not None:
        tokens = {"tokens": told["length"] + PROMPT - sampled, "train_size": args.steps}
        settings["data"] = {"class_path": "context_ladder.LongPrompts", "init_args": tokens}
    rollout["check_every"] = 10**6
    engine = {"max_num_batched_tokens": PREFILL, "kv_cache_dtype": args.kv_dtype}
    rollout["engine"]["init_args"] |= engine
    if not on_gpu:
        rollout["engine"] = {"class_path": "qerl_pl.engines.TransformersEngine"}
    sys.argv = sys.argv[:1]
    cli = QeRLCLI({"subcommand": "fit", "fit": settings})
    callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
    memory = next(one for one in callbacks if type(one).__name__ == rl_step.DriverMemory.__name__)
    later = memory.steps[1:] or memory.steps
    seconds = [sum(step.get(name, 0.0) for name in rl_step.PHASES) for step in later]
    peaks = {phase: peak - held / GIB for phase, peak in memory.peaks.items()}
    result = {
        "seconds": statistics.median(seconds),
        "phases": {name: statistics.median(step.get(name, 0.0) for step in later) for name in rl_step.PHASES},
        "tokens": later[-1]["completions/length_mean"],
        "peak_gib": peaks,
        "steps": memory.steps,
    }
    (args.out / "step.json").write_text(json.dumps(result))
    del rest


def write_ladder(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    rows: list[list[Any]] = []
    for card, lengths in found.items():
        for length, one in sorted(lengths.items(), key=lambda item: int(item[0])):
            row = [card, length, f"{one['kv_gib']:.1f}"]
            if not one["fits"]:
                rows.append([*row, one.get("outcome", "does not fit"), "–", f"{one['estimate_gib']:.1f}", "–"])
                continue
            peak = max(one["peak_gib"].values(), default=0.0)
            apart = f"{100 * (one['estimate_gib'] / peak - 1):+.1f}" if peak else "–"
            rows.append([*row, f"{one['seconds']:.1f}", f"{peak:.1f}", f"{one['estimate_gib']:.1f}", apart])
    headers = ["card GiB", "completion", "KV GiB", "s a step", "peak GiB", "estimate GiB", "apart %"]
    report.write(args.out, f"context_ladder_{args.shape}", report.markdown(headers, rows), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=random_model.SHAPES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--update-only", action="store_true", help="no engine, the whole card")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="of a completion, in tokens")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    update = parser.add_argument_group("the update alone")
    update.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    update.add_argument("--repeats", type=int, default=1, help="updates that count, after one that does not")
    update.add_argument("--snapshot", action="store_true", help="what is alive at the peak")
    full = parser.add_argument_group("full steps")
    full.add_argument("--cards", type=float, nargs="+", default=[12, 16, 24, 32, 48, 80], help="GiB")
    full.add_argument("--checkpointing", choices=("true", "offload"), default="offload")
    full.add_argument("--tile", type=int, default=4096, help="mlp_tile_tokens")
    full.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="kv_cache_dtype")
    full.add_argument("--state-bits", type=int, choices=(32, 8), default=32, help="of the optimizer's states")
    full.add_argument("--sampled", type=int, help="tokens that are sampled; the rest of a completion is the prompt's")
    full.add_argument("--steps", type=int, default=2)
    full.add_argument("--group", type=int, default=GROUP, help="completions of a prompt; fewer need the same memory if "
                      "they are at least as many as are sampled at once")  # fmt: skip
    full.add_argument(
        "--eager", action="store_true", help="start vLLM without compiling: a minute sooner, slower steps"
    )
    full.add_argument("--margin", type=float, default=0.3, help="GiB of a card that the estimate leaves free")
    full.add_argument("--limit", type=float, default=400.0, help="seconds of a length")
    full.add_argument("--minutes", type=float, default=25.0, help="begin no length after so many")
    full.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.checkpointing = True if args.checkpointing == "true" else args.checkpointing
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        one_step(json.loads(args.one))
        return
    if args.device == "cuda":
        select_backend("triton")
    (updates if args.update_only else ladder)(args)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
