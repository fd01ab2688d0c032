"""QeRL on PyTorch Lightning: reinforcement learning of 4-bit policies with LoRA and adaptive quantization noise."""

import os

# Before PyTorch starts its threads: waiting threads that spin make a CPU run many times slower beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
