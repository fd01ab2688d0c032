"""The command line."""

import logging

# bitsandbytes, which peft imports before `configure_terminal` runs, warns of a CPU kernel that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")
)
