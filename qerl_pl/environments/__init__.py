"""Environments of dialogues: their contract, the processes that run them, and the tools that come with the package."""

from qerl_pl.environments.calculator import Calculator
from qerl_pl.environments.contract import Opening, ToolAnswer
from qerl_pl.environments.pool import EnvironmentPool, Session
from qerl_pl.environments.search import Search

__all__ = ["Calculator", "EnvironmentPool", "Opening", "Search", "Session", "ToolAnswer"]
