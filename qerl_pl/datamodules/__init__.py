"""Data modules: prompts with reference answers, and conversations for supervised fine-tuning."""

from qerl_pl.datamodules.conversations import ConversationDataModule
from qerl_pl.datamodules.datasets import BigMathDataModule, GSM8KDataModule, TableDataModule
from qerl_pl.datamodules.generated import ArithmeticConversations, ArithmeticDataModule, GuessingDataModule
from qerl_pl.datamodules.prompts import PromptDataModule
from qerl_pl.datamodules.tables import Row, TableConfig

__all__ = [
    "ArithmeticConversations",
    "ArithmeticDataModule",
    "BigMathDataModule",
    "ConversationDataModule",
    "GSM8KDataModule",
    "GuessingDataModule",
    "PromptDataModule",
    "Row",
    "TableConfig",
    "TableDataModule",
]
