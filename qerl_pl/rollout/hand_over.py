"""What passes from whoever drives the engine to the module that trains."""

from dataclasses import dataclass

from qerl_pl.engines.base import SharedWeights
from qerl_pl.evaluation.evaluator import Samples
from qerl_pl.rollout.experience import Experience
from qerl_pl.types import Evaluation


@dataclass
class HandOver:
    """A place for what was sampled for the step to come, and for the weights that the engine lends."""

    shared: SharedWeights | None = None
    """Weights of the base model to use instead of an own copy."""
    cache_gib: float = 0.0
    """What the engine gives back of its key/value cache while it sleeps, and the update has."""
    experience: Experience | None = None
    """What the next training step learns from."""
    evaluation: Evaluation | None = None
    """What the next validation or test step logs."""
    samples: Samples | None = None
    """Where evaluations keep what they sample; the report's callback sets it."""

    def take_experience(self) -> Experience:
        """The experience, once."""
        experience, self.experience = self.experience, None
        assert experience is not None, "a rollout comes before each training step"
        return experience

    def take_evaluation(self) -> Evaluation:
        """The evaluation, once."""
        evaluation, self.evaluation = self.evaluation, None
        assert evaluation is not None, "sampling comes before each validation step"
        return evaluation
