"""The command line."""

import logging

# Said when it is imported, which peft does before `terminal` has a say: that a CPU's product of 4 bits, of which
# nothing here makes use, was not found on the hub.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")
)
