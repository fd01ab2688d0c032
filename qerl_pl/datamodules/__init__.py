"""Where prompts and their references come from."""

from qerl_pl.datamodules.arithmetic import ArithmeticDataModule
from qerl_pl.datamodules.base import PromptDataModule
from qerl_pl.datamodules.bigmath import BigMathDataModule
from qerl_pl.datamodules.gsm8k import GSM8KDataModule
from qerl_pl.datamodules.rows import Row
from qerl_pl.datamodules.sets import TableConfig

__all__ = ["ArithmeticDataModule", "BigMathDataModule", "GSM8KDataModule", "PromptDataModule", "Row", "TableConfig"]
