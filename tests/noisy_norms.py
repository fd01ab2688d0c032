"""The sampler's noise on the trainer's norms, to compare log-probabilities of both under the same noise."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl_pl.algorithm import NormNoise
from qerl_pl.policy.policy import Policy


@contextmanager
def noisy_norms(policy: Policy, noise: NormNoise | None) -> Iterator[None]:
    """Inside the block the policy's norms have the noise that an engine is synced with; None for none."""
    norms = {} if noise is None else policy.trained.norms()
    clean = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    with torch.no_grad():
        for name, norm in norms.items():
            norm.weight += noise.of_norm(name, norm.multiplier(norm.weight)).to(norm.weight.device)
        yield
        for name, norm in norms.items():
            norm.weight.copy_(clean[name])
