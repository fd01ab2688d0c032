"""Parameters that are taken over from a checkpoint, or changed for a while."""

import re

import pytest
import torch

from qerl_pl.errors import UserError
from qerl_pl.policy.adapter import load_in_place, restored_parameters


def test_what_is_taken_over_is_written_in_place() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(1, 2)}
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    load_in_place(own, {"b": torch.full((1, 2), 3.0), "a": torch.tensor([1.0, 2.0])}, "weights", "model.policy")
    assert own["a"].tolist() == [1.0, 2.0] and own["b"].tolist() == [[3.0, 3.0]]
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == places


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": (2,)}, "1 in all: b is nothing there and (2,) here"),
        ({"a": (2,), "c": (3, 1)}, "2 in all: b is nothing there and (2,) here"),
        ({"a": (2,), "b": (2,), "c": (3, 1)}, "1 in all: c is (3, 1) there and nothing here"),
        ({"a": (2,), "b": (1,)}, "1 in all: b is (1,) there and (2,) here"),
        ({"a": (1,), "b": (2,)}, "1 in all: a is (1,) there and (2,) here"),
    ],
)
def test_nothing_is_taken_over_where_one_does_not_fit(other: dict[str, tuple[int, ...]], said: str) -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(
        UserError,
        match=rf"^a checkpoint must hold this policy's weights; got other names or shapes, {re.escape(said)}; "
        "set model.policy as in the run that wrote it$",
    ):
        load_in_place(own, {name: torch.ones(shape) for name, shape in other.items()}, "weights", "model.policy")
    assert not own["a"].any() and not own["b"].any()  # `ones` of one number would have been spread over both


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_given_back_whatever_happens(fails: bool) -> None:
    parameters = [torch.nn.Parameter(torch.tensor([0.1, float("nan")])), torch.nn.Parameter(torch.tensor([-0.0]))]
    before = [(parameter.data_ptr(), parameter.detach().view(torch.int32).tolist()) for parameter in parameters]
    try:
        with restored_parameters(parameters):
            for parameter in parameters:
                parameter.data.add_(1.0)
            if fails:
                raise InterruptedError
    except InterruptedError:
        assert fails
    after = [(parameter.data_ptr(), parameter.detach().view(torch.int32).tolist()) for parameter in parameters]
    assert after == before
