"""Attention of many sequences is not cut into parts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import worker
from qerl_pl.engines.vllm.worker import attend_in_one_part
from qerl_pl.types import RolloutRequest, SamplingConfig


class Builder:
    """What vLLM's has."""

    aot_schedule = True
    num_heads_kv = 4

    def __init__(self, most: int = 32) -> None:
        self.max_num_splits = most

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> tuple[int, bool]:
        if common_prefix_len < 0:
            raise ValueError
        return self.max_num_splits, fast_build


class Other:
    """Of attention that knows no parts."""

    def build(self) -> None:
        """Nothing."""


def test_from_enough_sequences_on_nothing_is_cut() -> None:
    builder, none, other = Builder(), Builder(most=0), Other()
    groups = [[SimpleNamespace(metadata_builders=[one])] for one in (builder, none, other)]
    assert attend_in_one_part(groups, processors=132) == 1
    assert type(none) is Builder and type(other) is Other
    sequences = [SimpleNamespace(num_reqs=count) for count in (49, 50)]  # 1.5 * 132 = 198 programs are enough
    assert [builder.build(0, some) for some in sequences] == [(32, False), (1, False)]
    assert builder.build(0, sequences[1], fast_build=True) == (1, True)
    with pytest.raises(ValueError):
        builder.build(-1, sequences[1])
    assert builder.max_num_splits == 32  # as vLLM has set it


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_engine_samples_the_same_with_parts_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=512, num_hidden_layers=2, max_position_embeddings=1024, **sizes)
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model.bfloat16().save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(10, 500, (100 + 8 * index,), generator=draw).tolist() for index in range(64)]
    requests = [RolloutRequest(tuple(ids), (index,)) for index, ids in enumerate(prompts)]
    found: list[tuple[int, list[Any]]] = []
    for enough in (0.0, float("inf")):  # in one part always, never
        monkeypatch.setattr(worker, "ENOUGH", enough)
        changed: list[int] = []

        def attend(*args: Any, changed: list[int] = changed) -> int:
            changed.append(attend_in_one_part(*args))
            return changed[-1]

        monkeypatch.setattr(worker, "attend_in_one_part", attend)
        engine = VLLMEngine(kv_cache_gib=0.5, max_num_seqs=64, linear_backend="auto", share_weights=False)
        engine.launch(EngineSpec(tmp_path, torch.bfloat16, torch.device("cuda"), 0, (), 700))
        found.append((sum(changed), engine.generate(requests, SamplingConfig(max_tokens=48, temperature=1.0))))
        engine.close()
    (first, one), (second, several) = found
    assert first == second == 1
    pairs = [(a[0], b[0]) for a, b in zip(one, several, strict=True)]
    apart, same = [], 0
    for a, b in pairs:
        for x, y, p, q in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=False):
            if x != y:
                break
            apart.append(abs(p - q))
            same += 1
    assert same > 0.25 * 64 * 48  # the rest goes on from another token
    assert sum(apart) / len(apart) < 0.02
