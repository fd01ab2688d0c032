"""Fixtures that more than one test file uses, and the environment that all tests share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# What the package caches (quantized bases) stays out of the user's cache.
os.environ["QERL_CACHE"] = tempfile.mkdtemp(prefix="qerl-tests-")
# Triton reads this when it is first imported: without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))
# Small tensors: more threads only wait for each other, and sums come out the same on every machine.
torch.set_num_threads(1)


SLOW_FILES = ("test_resume", "test_ranks", "test_fit", "test_mistakes", "test_engines", "test_ops_few", "test_watch")
"""Files that take longest, most of them for the processes that they start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slow files first: a file runs on one worker, and the other would wait for the last one."""
    items.sort(key=lambda item: SLOW_FILES.index(item.path.stem) if item.path.stem in SLOW_FILES else len(SLOW_FILES))


@pytest.fixture(scope="session", autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["QERL_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer toy checkpoint in Hugging Face format, barely trained; tests must not write into it."""
    from qerl_pl.toy import ToyConfig, build_toy_policy

    config = ToyConfig(layers=2, intermediate=128, steps=2, batch_size=2)
    return build_toy_policy(config, tmp_path_factory.mktemp("toy"))
