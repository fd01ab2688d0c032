"""Corrections of the difference between sampler and trainer: importance weights and rejection.

The sampler is quantized, noisy, and computed by other kernels than the trainer, so that what it samples is off-policy.
With rho_t = pi_old(y_t) / pi_sampler(y_t), the ratio of the clean trainer at the time of the rollout to the sampler, a
completion's ratio is, at three levels:

- "token": rho_t at each token. A biased correction of the completion's distribution, of low variance.
- "sequence": the product of its rho_t at every token. Unbiased; its variance grows with the length.
- "geometric": the geometric mean of its rho_t at every token, independent of the length.

Sources: truncated importance sampling (TIS), Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (2025); sequence level and geometric masks, Liu et al., "When Speed Kills Stability: Demystifying RL Collapse
from the Training-Inference Mismatch" (2025); IcePop (Ring-1T, arXiv 2510.18855).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from qerl_pl.algorithm.losses import MAX_LOG_RATIO
from qerl_pl.errors import UserError, require_one_of
from qerl_pl.runtime.import_path import load_named

Level = Literal["token", "sequence", "geometric"]
CorrectionFunction = Callable[[Tensor, Tensor], Tensor]
"""Importance weights [B, T], 0 for a rejected token, of log rho [B, T] and of the tokens that train, bool [B, T]."""


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights and rejection between sampler and trainer; the two are independent.

    A rejected token has weight 0 and keeps its place in the denominators of the loss. KL penalty and entropy bonus have
    no weights.

    Args:
        weights: Level of the importance weights: token, sequence or geometric; null leaves every weight at 1.
        cap: Largest importance weight (truncated importance sampling); null is no limit.
        rejection: Level of the ratio that must lie in [low, high]: token rejects tokens, the others completions; null
            rejects nothing.
        low: Smallest ratio that is not rejected; 0 is no limit.
        high: Largest ratio that is not rejected; null is no limit.
        outlier_low: Rejects a completion if one of its tokens has a smaller ratio; null is no limit.
        outlier_high: Rejects a completion if one of its tokens has a larger ratio; null is no limit.

    Raises:
        UserError: A bound is not positive, a range is empty, or a level is unknown.
    """

    weights: Level | None = "token"
    cap: float | None = 2.0
    rejection: Level | None = None
    low: float = 0.5
    high: float | None = 2.0
    outlier_low: float | None = None
    outlier_high: float | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "rejection"):
            if getattr(self, name) is not None:
                require_one_of(get_args(Level), f"correction.{name}", getattr(self, name))
        for name in ("cap", "high", "outlier_low", "outlier_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"correction.{name} must be a number above 0; got {value}; use null for no limit.")
        if not (math.isfinite(self.low) and self.low >= 0):
            raise UserError(f"correction.low must be a number of at least 0; got {self.low}; use 0 for no limit.")
        for low, high in (("low", "high"), ("outlier_low", "outlier_high")):
            if (getattr(self, low) or 0) >= (getattr(self, high) or math.inf):
                raise UserError(
                    f"correction.{low} must be below correction.{high}; got {getattr(self, low)} and "
                    f"{getattr(self, high)}; swap them."
                )


PRESETS: dict[str, RolloutCorrection] = {
    "off": RolloutCorrection(weights=None),
    "token_tis": RolloutCorrection(),
    "sequence_tis": RolloutCorrection(weights="sequence"),
    "token_mask": RolloutCorrection(cap=None, rejection="token", low=0.0),
    "sequence_mask": RolloutCorrection(weights="sequence", cap=None, rejection="sequence", low=0.0),
    "geometric_mask": RolloutCorrection(weights=None, rejection="geometric", low=0.99, high=1.01, outlier_low=1e-4),
    "geometric_mask_token_tis": RolloutCorrection(rejection="geometric", low=0.99, high=1.01, outlier_low=1e-4),
    "icepop": RolloutCorrection(cap=None, rejection="token", low=0.5, high=5.0),
}
"""Corrections by name. `token_tis` is the default; `sequence_mask` is the masked importance sampling of Liu et al.; the
range of the geometric masks is SkyRL's, the threshold of outliers verl's; that of `icepop` is the paper's."""


def named_correction(name: str) -> RolloutCorrection | CorrectionFunction:
    """The preset, or a user's `CorrectionFunction`, of that name; UserError if there is none, or it is no function."""
    if name in PRESETS:
        return PRESETS[name]
    rule = (
        f"correction must be one of {', '.join(PRESETS)}, their settings, or the name of a function of (log rho, mask)"
    )
    function = load_named(name, rule, "choose one, or write my_corrections.squared", "correction")
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{rule}; {name} is a {type(function).__name__}; name a function")
    return cast(CorrectionFunction, function)


class CorrectionWeights(NamedTuple):
    """Importance weights and rejection of each token, [B, T]; arbitrary outside the mask."""

    weights: Tensor
    """Importance weights, 0 where rejected, without gradient."""
    rejected: Tensor
    """bool."""
    capped: Tensor
    """Whether the cap decided the weight, bool."""


def level_log_ratio(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Log of a completion's ratio at each of its tokens [B, T], of log rho_t [B, T] and the tokens that train.

    A completion without such a token has log ratio 0 at the levels of completions; see the module.
    """
    if level == "token":
        return log_ratio
    total = torch.where(mask, log_ratio, 0.0).sum(dim=1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand_as(log_ratio)


def correction_weights(
    correction: RolloutCorrection | CorrectionFunction, old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> CorrectionWeights:
    """Importance weights of a micro-batch whose rows are complete completions; all tensors are [B, T].

    Tokens outside the mask, which do not train, count nowhere.

    Raises:
        UserError: A user's function returns something else than a weight for each token.
    """
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if not isinstance(correction, RolloutCorrection):
        found: object = correction(log_ratio, mask)
        if not isinstance(found, Tensor) or found.shape != mask.shape:
            got = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise UserError(
                f"correction must return a weight for each token, {list(mask.shape)}; got {got}; correct it"
            )
        found = found.detach().to(log_ratio.dtype)
        return CorrectionWeights(found, found == 0, torch.zeros_like(mask))
    weights, capped = torch.ones_like(log_ratio), torch.zeros_like(mask)
    if correction.weights is not None:
        weights = torch.exp(level_log_ratio(log_ratio, mask, correction.weights).clamp(max=MAX_LOG_RATIO))
        if correction.cap is not None:
            weights, capped = weights.clamp(max=correction.cap), weights > correction.cap
    rejected = torch.zeros_like(mask)
    if correction.rejection is not None:
        of_level = level_log_ratio(log_ratio, mask, correction.rejection)
        rejected = _outside(of_level, correction.low, correction.high)
    if correction.outlier_low is not None or correction.outlier_high is not None:
        outliers = _outside(log_ratio, correction.outlier_low, correction.outlier_high) & mask
        rejected = rejected | outliers.any(dim=1, keepdim=True)
    return CorrectionWeights(torch.where(rejected, 0.0, weights), rejected, capped & ~rejected)


def _outside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Whether ratios lie outside [low, high], bool [B, T]."""
    lowest = math.log(low) if low else -math.inf
    highest = math.inf if high is None else math.log(high)
    return (log_ratio < lowest) | (log_ratio > highest)
