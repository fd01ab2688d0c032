"""Algorithms that repeat: inside the block only, and a user's stricter setting stays."""

import pytest
import torch

from qerl_pl.random_state import deterministic


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_the_block_asks_for_repeatable_algorithms_and_leaves_nothing_behind() -> None:
    before = settings()
    with pytest.raises(KeyError), deterministic():
        assert settings() == (True, True, False)
        raise KeyError
    assert settings() == before and not before[0]


def test_a_users_own_strict_setting_stays_strict() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with deterministic():
            assert settings() == (True, False, True)
        assert settings() == (True, False, True)
    finally:
        torch.use_deterministic_algorithms(False)
