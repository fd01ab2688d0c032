"""The rollout: completions of a batch of prompts, their rewards and advantages, as an `Experience`."""

from qerl_pl.rollout.collector import Collector, CollectorConfig
from qerl_pl.rollout.scoring import Scorer

__all__ = ["Collector", "CollectorConfig", "Scorer"]
