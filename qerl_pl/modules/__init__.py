"""The policy and the modules that train it."""

from qerl_pl.modules.lora import LoraConfig
from qerl_pl.modules.policy import Policy, PolicyConfig
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.modules.sft import SFTModule
from qerl_pl.modules.teacher import TeacherConfig

__all__ = ["LoraConfig", "Policy", "PolicyConfig", "QeRLModule", "SFTModule", "TeacherConfig"]
