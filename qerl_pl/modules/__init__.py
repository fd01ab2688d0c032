"""The policy and the modules that train it."""

from qerl_pl.modules.optimizer import build_schedule
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.modules.sft import SFTModule
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy.lora import LoraConfig
from qerl_pl.policy.policy import Policy, PolicyConfig
from qerl_pl.policy.teacher import TeacherConfig

__all__ = [
    "LoraConfig",
    "Policy",
    "PolicyConfig",
    "PolicyUpdate",
    "QeRLModule",
    "SFTModule",
    "TeacherConfig",
    "build_schedule",
]
