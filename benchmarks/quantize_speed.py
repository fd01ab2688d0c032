"""`qerl quantize` on a CPU and on a GPU: seconds, memory, and whether both write the same bytes.

    python benchmarks/quantize_speed.py --layers 4 --out results               # four layers of 7B
    python benchmarks/quantize_speed.py --shape 32b --devices cuda --out results
    python benchmarks/quantize_speed.py --shape tiny --devices cpu --out results

Source and output lie in --folder, by default in memory where there is a /dev/shm, so that no disk is measured. Memory
is the process's own (anonymous pages); pages of the files it maps can be taken back at any time and do not count.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from random_model import SHAPES, write_model

from qerl_pl.models.folder import QUANTIZATION_REPORT
from qerl_pl.models.memory import files_gib


def anonymous_gib(pid: int) -> float:
    """GiB of a process's own memory now; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 2**20


def digest(folder: Path) -> str:
    """Of everything that was written, names included; the report's errors are sums, whose order a GPU changes."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != QUANTIZATION_REPORT:
            found.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(2**24):
                    found.update(block)
    return found.hexdigest()


def quantize(source: Path, target: Path, device: str, compare: bool) -> dict[str, Any]:
    """One run of the command in a process of its own; `target` is gone afterwards."""
    command = [sys.executable, "-m", "qerl_pl", "quantize", str(source), str(target)]
    start, peak = time.perf_counter(), 0.0
    process = subprocess.Popen([*command, "--device", device])
    while process.poll() is None:
        peak = max(peak, anonymous_gib(process.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    error = json.loads((target / QUANTIZATION_REPORT).read_text())["mean_relative_squared_error"]
    row = {"device": device, "seconds": seconds, "peak_gib": peak, "error": error}
    row["sha256"] = digest(target) if compare else None
    shutil.rmtree(target)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, help="of the model, where fewer than the shape's are to do")
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), default=["cpu", "cuda"])
    parser.add_argument("--source", type=Path, help="a 16-bit model to take instead of making one")
    parser.add_argument("--folder", type=Path, help="where source and output are written")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.layers:
        hidden, intermediate, _, *rest = SHAPES[args.shape]
        SHAPES[args.shape] = (hidden, intermediate, args.layers, *rest)
    memory = Path("/dev/shm")
    folder = (args.folder or (memory if memory.is_dir() else Path.cwd())) / "qerl-quantize"
    source = args.source or folder / args.shape
    if not source.exists():
        write_model(source, args.shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"), nvfp4=False)
    size = files_gib(source)
    compare = len(args.devices) > 1
    rows = [quantize(source, folder / "out", device, compare) for device in args.devices]
    if args.source is None:
        shutil.rmtree(folder)
    equal = len({row["sha256"] for row in rows}) == 1 if compare else "–"
    cells = [
        [row["device"], f"{row['seconds']:.1f}", f"{row['peak_gib']:.2f}", f"{row['error']:.3e}", equal] for row in rows
    ]
    headers = ["device", "s, start included", "peak GiB of RAM", "relative squared error", "same bytes"]
    layers, threads = args.layers or "all", torch.get_num_threads()
    about = f"{args.shape}, {layers} layers: {size:.1f} GiB of 16-bit weights; {threads} CPU threads"
    table = f"{report.markdown(headers, cells)}\n\n{about}"
    report.write(args.out, f"quantize_{args.shape}_{'_'.join(args.devices)}", table, {"gib": size, "rows": rows})


if __name__ == "__main__":
    main()
