"""Long completions and small cards, one row by name: does a step fit the card, what does it need beside the estimate.

    python benchmarks/context_bars.py --out results  # all, the quickest first
    python benchmarks/context_bars.py --bars 32b-1k 8b-20k --sampled 256 --minutes 8 --out results
    python benchmarks/context_bars.py --device cpu --out results  # does the script run? tiny shapes, 64 tokens

The rows are those of docs/memory.md. Each is a step of 8 completions in a process of its own, beside one allocation
that holds the rest of the card (`context_ladder.py`), as many sampled at once as there is room for. The table is
written after every row, and what was measured with the same settings is not measured again: the same command goes on.
--sampled 256 measures memory alone in rows whose completions would take longer to sample than the machine is there,
and so does --group 4, as long as no more than 4 completions fit in the cache at once.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import context_ladder
import report
import torch
from qerl_kernels import select_backend


class Bar(NamedTuple):
    """A row."""

    shape: str
    length: int
    """Tokens of a completion."""
    card: float
    """GiB."""
    rank: int = 32
    checkpointing: bool | str = True
    kv_dtype: str = "auto"
    state_bits: int = 32


BARS = {
    "3b-1k": Bar("3b", 1024, 6),
    "7b-1k": Bar("7b", 1024, 11),
    "32b-1k": Bar("32b", 1024, 23.6, 16, "offload", state_bits=8),
    "14b-4k": Bar("14b", 4096, 23.6),
    "8b-20k": Bar("8b", 20480, 30, kv_dtype="fp8"),
    "32b-32k": Bar("32b", 32768, 79.1),
    "8b-128k": Bar("8b", 131072, 79.1),
}
"""By name, in the order in which they run unless --bars has another: the quickest first."""


def arguments(bar: Bar, args: argparse.Namespace) -> argparse.Namespace:
    """Those of `context_ladder.step`; on a CPU of a tiny shape."""
    shape = "tiny" if args.device == "cpu" else bar.shape
    given = {"device": args.device, "base": args.base, "out": args.out, "shape": shape, "rank": bar.rank}
    given |= {"checkpointing": bar.checkpointing, "kv_dtype": bar.kv_dtype, "state_bits": bar.state_bits, "tile": None}
    given |= {"sampled": None if args.sampled is None or args.sampled >= bar.length else args.sampled}
    given |= {name: getattr(args, name) for name in ("steps", "group", "eager", "margin", "limit")}
    return argparse.Namespace(**given)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows that `--bars` names and that have no result with these settings; writes after each."""
    path, began = args.out / "context_bars.json", time.monotonic()
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}
    for name in args.bars:
        bar = BARS[name]
        given, length = arguments(bar, args), 64 if args.device == "cpu" else bar.length
        earlier = results.get(name, {})
        if earlier.get("settings") == context_ladder.settings_of(given) and earlier.get("outcome") != "failed":
            continue
        if time.monotonic() - began > args.minutes * 60:
            break
        context_ladder.base_of(given)
        row = context_ladder.step(given, bar.card, length)
        at_once = min(int(row["kv_gib"] / context_ladder.sequence_gib(given, length) + 1e-6), args.group)
        about = {"shape": given.shape, "length": length, "card": bar.card, "at_once": at_once}
        results[name] = row | about | {"settings": context_ladder.settings_of(given)}
        write(results, args.out)
    return results


def write(results: dict[str, Any], out: Path) -> None:
    """The table, rows in the order of `BARS`."""
    headers = ["bar", "tokens", "completions", "sampled", "card GiB", "rank", "checkpointing", "KV", "states, bits"]
    headers += ["at once", "s a step", "peak GiB rollout / update", "estimate GiB", "apart %"]
    rows = []
    for name, one in sorted(results.items(), key=lambda item: list(BARS).index(item[0])):
        settings = one["settings"]
        row = [name, one["length"], settings["group"], settings["sampled"] or "all", one["card"], settings["rank"]]
        row += [str(settings["checkpointing"]).lower(), settings["kv_dtype"], settings["state_bits"], one["at_once"]]
        if not one["fits"]:
            rows.append([*row, one["outcome"], "–", f"{one['estimate_gib']:.1f}", "–"])
            continue
        peaks = [one["peak_gib"].get(phase, 0.0) for phase in ("rollout", "update")]
        apart = f"{100 * (one['estimate_gib'] / max(peaks) - 1):+.1f}" if max(peaks) else "–"
        shown = " / ".join(f"{peak:.1f}" for peak in peaks)
        rows.append([*row, f"{one['seconds']:.1f}", shown, f"{one['estimate_gib']:.1f}", apart])
    report.write(out, "context_bars", report.markdown(headers, rows), results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bars", nargs="+", choices=BARS, default=list(BARS), help="in this order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sampled", type=int, help="tokens that are sampled; the rest of a completion is the prompt's")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--group", type=int, default=context_ladder.GROUP, help="completions of a prompt")
    parser.add_argument("--eager", action="store_true", help="start vLLM without compiling: sooner, slower steps")
    parser.add_argument("--margin", type=float, default=0.3, help="GiB of a card that the estimate leaves free")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a row")
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no row after so many")
    parser.add_argument("--base", type=Path, default=Path("/dev/shm/qerl-shapes"), help="keeps the models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda":
        select_backend("triton")
        assert torch.cuda.is_available(), "--device cpu tries the script without a GPU"
    measure(args)


if __name__ == "__main__":
    main()
