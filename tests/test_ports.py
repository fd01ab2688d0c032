"""Free TCP ports: many runs start on a machine at once, and what one has looked up another may take."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm.startup import import_vllm
from qerl_pl.errors import UserError
from qerl_pl.types import RolloutRequest, SamplingConfig


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process has taken since it was found free."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield other.getsockname()[1]


def launch(base: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> VLLMEngine:
    """An engine in a vLLM that listens, as 0.25 always does, at what it has looked up before."""
    assert not distributed.is_initialized()
    import_vllm()
    from vllm.v1.executor import uniproc_executor

    monkeypatch.setattr(uniproc_executor, "aiter_requires_tcp_store", lambda: True, raising=False)
    monkeypatch.setattr(uniproc_executor, "get_distributed_init_method", lambda ip, port: method)
    engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=4)
    engine.launch(EngineSpec(base, torch.float32, torch.device("cpu"), 4, ("q_proj",), 32))
    return engine


@pytest.mark.vllm
def test_an_engine_starts_where_the_port_that_vllm_has_found_is_taken(
    tiny_policy_dir: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = launch(tiny_policy_dir, monkeypatch, f"tcp://127.0.0.1:{taken}")
    (completion,) = engine.generate([RolloutRequest((5, 6), (0,))], SamplingConfig(max_tokens=3))[0]
    engine.close()
    assert completion.token_ids


@pytest.mark.vllm
def test_a_machine_without_a_port_is_no_matter_of_the_engines_settings(
    tiny_policy_dir: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"a free TCP port of this machine; got none .*{taken}.*EADDRINUSE.*: see what"):
        launch(tiny_policy_dir, monkeypatch, f"tcp://127.0.0.1:{taken}?use_libuv=1")  # not read as a port: left alone
