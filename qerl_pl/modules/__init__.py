"""The policy and the module that trains it."""

from qerl_pl.modules.lora import LoraConfig
from qerl_pl.modules.policy import Policy, PolicyConfig
from qerl_pl.modules.qerl import QeRLModule

__all__ = ["LoraConfig", "Policy", "PolicyConfig", "QeRLModule"]
