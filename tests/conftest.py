"""Fixtures that more than one test file uses, and the environment that all tests share."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment, but for the process that hands out tests to workers: it would import torch first."""
    if config.getoption("dist", "no") != "no":
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # What the package caches (quantized bases) stays out of the user's cache.
    os.environ["QERL_CACHE"] = tempfile.mkdtemp(prefix="qerl-tests-")
    import torch

    # Triton reads this when it is first imported: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))
    # Small tensors: more threads only wait for each other, and sums come out the same on every machine.
    torch.set_num_threads(1)
    gc.disable()  # imports make a million objects that stay: searching them takes a third of the time of collecting


PROCESS_FILES = (
    *("test_ranks", "test_resume", "test_environment_runs", "test_full_ranks", "test_killed", "test_start"),
    *("test_terminal", "test_sft", "test_sft_page", "test_environment_page"),
)
"""Files whose processes come from one that imports the package, which takes seven seconds: one worker runs them all."""

VLLM_FILES = (
    *("test_engines", "test_families", "test_delta_nets", "test_dialogue_rollouts", "test_replay", "test_continued"),
    *("test_full", "test_kv_cache_dtype", "test_gpt_oss", "test_ports", "test_vllm_adapter", "test_vllm_compat"),
    *("test_vllm_decode_gemm", "test_vllm_experts", "test_vllm_marlin", "test_vllm_sampler"),
)
"""Files that import vLLM, which takes ten seconds: another runs these."""

SLOW_FILES = (
    *(*PROCESS_FILES, *VLLM_FILES, "test_watch", "test_configs", "test_docs", "test_math_answer", "test_fit"),
    *("test_environments", "test_decode_gemm", "test_reference_trajectory", "test_evaluation", "test_hostile_tools"),
    *("test_left_behind", "test_dry_run"),
)
"""Files that take longest, in that order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slow files first: a file runs on one worker, and the other would wait for the last one."""
    items.sort(key=lambda item: SLOW_FILES.index(item.path.stem) if item.path.stem in SLOW_FILES else len(SLOW_FILES))


def pytest_collection_finish() -> None:
    """What was imported is not searched in the tests either, nor by vLLM, which does so at each engine's end."""
    gc.freeze()
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files go to workers whole, and in the order of their tests above."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = Path(file).stem
            return "processes" if name in PROCESS_FILES else "vllm" if name in VLLM_FILES else file

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.fixture(scope="session", autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["QERL_CACHE"], ignore_errors=True)


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`qerl_pl.cli.main.main` sets these; give them back."""
    monkeypatch.setattr(sys, "argv", ["qerl"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session")
def tiny_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer toy checkpoint in Hugging Face format, barely trained; tests must not write into it."""
    from qerl_pl.toy.policy import ToyConfig, build_toy_policy

    config = ToyConfig(layers=2, intermediate=128, steps=2, batch_size=2)
    return build_toy_policy(config, tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def game_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer toy checkpoint that plays the guessing game, mostly badly; tests must not write into it."""
    from qerl_pl.toy.game import GuessingGame
    from qerl_pl.toy.policy import ToyConfig, build_toy_policy

    game = GuessingGame(highest=7, turns=3)
    config = ToyConfig(game=game, layers=1, intermediate=128, steps=100, batch_size=8, careless_fraction=0.7)
    return build_toy_policy(config, tmp_path_factory.mktemp("game"))
