"""Threads of PyTorch that wait for each other sleep, also where PyTorch was imported before this package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REGIONS = 200
COUNTED = f"""
import os, sys
from pathlib import Path
import torch
assert "qerl_pl" not in sys.modules
threads = torch.get_num_threads()
from short_run import data, module_of, trainer_of
def team():
    return {{int(path.name) for path in Path("/proc/self/task").iterdir()}}
def sleeps(thread):
    lines = Path(f"/proc/self/task/{{thread}}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
run = Path(sys.argv[1])
trainer_of(run, limit_train_batches=1, limit_val_batches=0, enable_checkpointing=False).fit(
    module_of(Path(sys.argv[2])), datamodule=data()
)
assert torch.get_num_threads() == threads
numbers = torch.zeros(2**17)
numbers.add_(1)
before = {{thread: sleeps(thread) for thread in team()}}
for _ in range({REGIONS}):
    numbers.add_(1)
    sum(range(5000))  # what one thread does between two operations
after = {{thread: sleeps(thread) for thread in team() & before.keys()}}
print(max(after[thread] - before[thread] for thread in after if thread != os.getpid()), threads)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_threads_that_wait_sleep_whatever_was_imported_first(tmp_path: Path, tiny_policy_dir: Path) -> None:
    places = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    words = [sys.executable, "-c", COUNTED, str(tmp_path), str(tiny_policy_dir)]
    path = os.pathsep.join([str(TESTS), *sys.path])
    found = subprocess.run(words, env=places | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    slept, threads = map(int, found.stdout.split()[-2:])
    assert slept > REGIONS / 4 or threads == 1
