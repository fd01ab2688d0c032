"""Data modules: prompts with reference answers."""

from qerl_pl.datamodules.datasets import ArithmeticDataModule, BigMathDataModule, GSM8KDataModule
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.tables import Row, TableConfig

__all__ = ["ArithmeticDataModule", "BigMathDataModule", "GSM8KDataModule", "PromptDataModule", "Row", "TableConfig"]
