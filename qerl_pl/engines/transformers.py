"""`TransformersEngine`: batched decoding with transformers, the readable reference of every engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qerl_pl.engines.base import (
    EngineSpec,
    RolloutEngine,
    SharedWeights,
    check_adapter,
    check_requests,
    check_targets,
    check_tensor,
    regroup,
    token_limit,
)
from qerl_pl.engines.layers import RoutingRecorder, SyncedLoraLinear, SyncedRMSNorm
from qerl_pl.errors import require_at_least
from qerl_pl.formats.dense_checkpoint import load_dense_model
from qerl_pl.models.families import family_of, family_of_class, noisy_norm_names
from qerl_pl.models.folder import end_token_ids, load_tokenizer
from qerl_pl.models.memory import held_gib
from qerl_pl.types import Completion, PolicyWeights, RolloutRequest, SamplingConfig


def uniforms(seed: int, count: int) -> Tensor:
    """The random numbers of a completion's tokens: float64 [count] in [0, 1) on the CPU."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sampling_log_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities of the distribution that tokens are sampled from, of logits [B, V] of any floating-point type.

    The filters apply in the order temperature, min-p, top-k, top-p. Temperature 0 gives the distribution at temperature
    1 without filters, as greedy decoding reports.

    Returns:
        float32 [B, V]; -inf where a filter drops the token.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        limit = logits.amax(-1, keepdim=True) + torch.tensor(sampling.min_p).log().item()
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        limit = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        drop = (before >= sampling.top_p).index_fill(1, torch.zeros(1, dtype=torch.long, device=logits.device), False)
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return logits.log_softmax(-1)


def pick_tokens(log_probs: Tensor, uniform: Tensor | None) -> Tensor:
    """A token for each row by inverting the cumulative distribution, or the most likely token.

    Args:
        log_probs: [B, V].
        uniform: float64 [B] in [0, 1); None decodes greedily.

    Returns:
        int64 [B], 0 in a row of NaN.
    """
    if uniform is None:
        return log_probs.argmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1]
    # Below the total, so that rounding never reaches past the last token of positive probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.where(total.isnan(), 0, index)


class TransformersEngine(RolloutEngine):
    """Batched decoding with a key/value cache on a dense copy of the base model.

    Prefill runs once for all completions of a request. Every completion draws from a random stream with its own seed,
    so that neither its neighbours nor the batch's order change it.

    Args:
        max_batch: Completions decoded at once; more use more memory and are faster.
    """

    def __init__(self, max_batch: int = 256) -> None:
        require_at_least(1, {"max_batch": max_batch})
        self.max_batch = max_batch
        self._spec: EngineSpec | None = None
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._linears: dict[str, SyncedLoraLinear] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._norms: dict[str, SyncedRMSNorm] = {}
        self._noisy: list[str] = []
        self._recorder: RoutingRecorder | None = None
        self._ends: tuple[int, ...] = ()

    def launch(self, spec: EngineSpec) -> None:
        """Load the base model with dense weights; add LoRA and float32 norms.

        Raises:
            UserError: No model of a known family in the folder, or no linear matches `spec.lora_targets`.
        """
        self._shapes = {}
        model = load_dense_model(spec.base, spec.dtype)
        nn.Module.to(model, device=spec.device)
        family = family_of(model.config.model_type)
        for name in noisy_norm_names([name for name, _ in model.named_modules()], family):
            self._norms[name] = SyncedRMSNorm.of(name, model.get_submodule(name))
            model.set_submodule(name, self._norms[name])
        self._noisy = list(self._norms)
        self._recorder = RoutingRecorder(model, family) if spec.record_routing else None
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        check_targets(spec, linears)
        for name, linear in linears.items():
            if spec.adapts(name):
                self._linears[name] = SyncedLoraLinear(linear, spec.lora_rank)
                model.set_submodule(name, self._linears[name])
                self._shapes[name] = linear.out_features, linear.in_features
        self._spec, self._model = spec, model
        self._tokenizer, self._ends = load_tokenizer(spec.base), end_token_ids(spec.base)

    def shared_weights(self) -> SharedWeights | None:
        """None: the engine's weights are dense, in modules of its own."""
        return None

    @torch.no_grad()
    def sync(self, weights: PolicyWeights) -> float:
        """Copy adapter and trained weights, and set the noise.

        Raises:
            UserError: As `check_adapter` and `check_tensor`.
        """
        assert self._model is not None and self._spec is not None, "launch comes first"
        adapter = weights.adapter or {}
        check_adapter(adapter, self._shapes, self._spec.lora_rank)
        for name, linear in self._linears.items():
            linear.enabled = name in adapter
            if name in adapter:
                linear.write(*adapter[name], weights.scaling)
        norms = self._write_all_but_norms(weights.tensors)
        for name, held in self._norms.items():
            clean = norms.get(name, held.base)
            noise = None
            if weights.noise is not None and name in self._noisy:
                noise = weights.noise.of_norm(name, held.multiplier(clean))
            held.write(clean, noise)
        return self._measured_std()

    def _write_all_but_norms(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy trained weights but for norms; return the norms' scales by module name."""
        assert self._model is not None
        held, modules = dict(self._model.named_parameters()), dict(self._model.named_modules())
        norms: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if family_of_class(type(modules.get(module)).__name__, "RMSNorm"):
                self._norms[module] = SyncedRMSNorm.of(module, modules[module])
                self._model.set_submodule(module, self._norms[module])
            if module in self._norms:
                norms[module] = tensor
            else:
                check_tensor(name, held.get(name), tensor).copy_(tensor)
        return norms

    def _measured_std(self) -> float:
        norms = [self._norms[name] for name in self._noisy]
        differences = [norm.scale.double() - norm.clean.double() for norm in norms]
        return torch.cat(differences).std(correction=0).item() if differences else 0.0

    @torch.inference_mode()
    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> list[list[Completion]]:
        """Sample a completion for each seed of each request.

        Raises:
            UserError: As `check_requests`.
        """
        assert self._spec is not None, "launch comes first"
        check_requests(requests, sampling, self._spec, has_tokenizer=self._tokenizer is not None)
        rows = [(index, seed) for index, request in enumerate(requests) for seed in request.seeds]
        completions: list[Completion] = []
        for start in range(0, len(rows), self.max_batch):
            chunk = rows[start : start + self.max_batch]
            first = chunk[0][0]
            prompts = [request.prompt_ids for request in requests[first : chunk[-1][0] + 1]]
            seeds, limits = [row[1] for row in chunk], [token_limit(requests[row[0]], sampling) for row in chunk]
            completions += self._decode(prompts, [row[0] - first for row in chunk], seeds, limits, sampling)
        return regroup(requests, completions)

    def _decode(
        self,
        prompts: list[tuple[int, ...]],
        owner: list[int],
        seeds: list[int],
        limits: list[int],
        sampling: SamplingConfig,
    ) -> list[Completion]:
        """Completions of a batch; row i continues prompts[owner[i]] by at most limits[i] tokens."""
        batch = self._prefill(prompts, torch.tensor(owner))
        sampled = _Sampled(seeds, limits, sampling, batch.logits.device)
        if batch.routing is not None:
            sampled.start_recording(self._prompt_routing(batch.routing, prompts, owner))
        for step in range(max(limits)):
            token = sampled.sample(batch.logits, step)
            ended = torch.isin(token, torch.tensor(self._ends, device=token.device, dtype=token.dtype))
            if sampling.stop:
                ended |= self._stop_string_seen(sampled, step, sampling.stop)
            sampled.end(ended, step)
            running = sampled.running()
            if not running.any():
                break
            if running.sum() <= 0.9 * len(running):  # worth a copy of the cache
                keep = running.nonzero()[:, 0]
                batch.select(keep)
                sampled.rows, token = sampled.rows[keep], token[keep]
            self._forward(batch, token[:, None])
            sampled.record(batch.routing, step)
        return sampled.completions()

    def _prefill(self, prompts: list[tuple[int, ...]], owner: Tensor) -> "_Batch":
        """Run each prompt once and copy its cache to every row that continues it; owner [B] indexes prompts."""
        assert self._model is not None and self._spec is not None
        device = self._spec.device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.arange(width) >= (width - lengths)[:, None]
        batch = _Batch(
            cache=DynamicCache(config=self._model.config),
            mask=mask.long().to(device) if bool((lengths < width).any()) else None,
            position=(mask.cumsum(-1) - 1).clamp(min=0).to(device),
        )
        self._forward(batch, ids.to(device))
        batch.select(owner.to(device))
        return batch

    @staticmethod
    def _prompt_routing(routing: Tensor, prompts: list[tuple[int, ...]], owner: list[int]) -> list[Tensor]:
        """Experts of each row's prompt [tokens, layers, k], from those of the left-padded prompts."""
        own = [experts[len(experts) - len(prompt) :] for experts, prompt in zip(routing, prompts, strict=True)]
        return [own[index] for index in owner]

    def _forward(self, batch: "_Batch", ids: Tensor) -> None:
        """Run the next tokens of each row, [B, T], and store logits and position of the token after them."""
        assert self._model is not None
        out = self._model(
            input_ids=ids,
            attention_mask=batch.mask,
            position_ids=batch.position,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        batch.logits, batch.position = out.logits[:, -1], batch.position[:, -1:] + 1
        batch.routing = None if self._recorder is None else self._recorder.take(*ids.shape)
        if batch.mask is not None:  # of the token after them
            batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(ids), 1)], dim=1)

    def _stop_string_seen(self, sampled: "_Sampled", step: int, stop: Sequence[str]) -> Tensor:
        assert self._tokenizer is not None
        window = max(len(string.encode()) for string in stop) + 1  # a token has at least one byte
        recent = sampled.tokens[sampled.rows, max(0, step + 1 - window) : step + 1].tolist()
        texts = self._tokenizer.batch_decode(recent, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return torch.tensor([any(s in text for s in stop) for text in texts], device=sampled.rows.device)

    def sleep(self) -> None:
        """Nothing to release: the cache lives only inside `generate`."""

    def wake(self) -> None:
        """Nothing to allocate."""

    def memory_gib(self) -> Mapping[str, float]:
        """GiB of the dense model, adapter and norms included; the cache lives only inside `generate`."""
        assert self._model is not None, "launch comes first"
        return {"weights": held_gib((*self._model.parameters(), *self._model.buffers()))}

    def close(self) -> None:
        """Drop the model."""
        self._model = None
        self._linears.clear()
        self._norms.clear()


@dataclass
class _Batch:
    """Inputs of the next forward pass, for the rows still in the batch."""

    cache: DynamicCache
    mask: Tensor | None
    """int64 [B, T], 0 at left padding; None when no prompt is padded."""
    position: Tensor
    """int64 [B, T] of the next tokens."""
    logits: Tensor = field(init=False)
    """[B, V] of the next token."""
    routing: Tensor | None = field(init=False, default=None)
    """Experts of the tokens of the last forward pass, int16 [its B, its T, layers, k]; None if not recorded."""

    def select(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)  # type: ignore[arg-type]  # layers with states have no batch_select_indices
        self.mask = None if self.mask is None else self.mask[rows]
        self.position, self.logits = self.position[rows], self.logits[rows]


class _Sampled:
    """Sampled tokens of all rows of a batch, running (`rows`) and ended."""

    def __init__(self, seeds: list[int], limits: list[int], sampling: SamplingConfig, device: torch.device) -> None:
        count, length = len(seeds), max(limits)
        self._sampling = sampling
        self._uniforms: Tensor | None = None
        if sampling.temperature > 0:
            drawn = [uniforms(seed, limit) for seed, limit in zip(seeds, limits, strict=True)]
            self._uniforms = nn.utils.rnn.pad_sequence(drawn, batch_first=True).to(device)
        self.rows = torch.arange(count, device=device)
        self.tokens = torch.zeros(count, length, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(count, length, device=device)
        self._lengths = torch.tensor(limits, device=device)
        self._limits = self._lengths.clone()
        self._ended = torch.zeros(count, dtype=torch.bool, device=device)
        self._running = torch.ones(count, dtype=torch.bool, device=device)
        self._prompts: list[Tensor] = []
        self._experts: Tensor

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """Sample the token number `step` of each row, [B], from logits [B, V]."""
        log_probs = sampling_log_probs(logits, self._sampling)
        token = pick_tokens(log_probs, None if self._uniforms is None else self._uniforms[self.rows, step])
        self.tokens[self.rows, step] = token
        self._logprobs[self.rows, step] = log_probs.gather(1, token[:, None])[:, 0]
        return token

    def start_recording(self, prompts: list[Tensor]) -> None:
        """Keep the experts of each row's prompt [tokens, layers, k], and make room for those of its tokens."""
        self._prompts = prompts
        self._experts = prompts[0].new_zeros(*self.tokens.shape, *prompts[0].shape[1:])

    def record(self, routing: Tensor | None, step: int) -> None:
        """Keep the experts [B, 1, layers, k] of the token number `step` of each row of the batch."""
        if routing is not None:
            self._experts[self.rows, step] = routing[:, 0]

    def running(self) -> Tensor:
        """bool [B]: rows of the batch that have not ended, and have room for another token."""
        return self._running[self.rows]

    def end(self, ended: Tensor, step: int) -> None:
        """End the rows of the batch where ended [B] is true, unless they ended before, and those at their limit."""
        rows = self.rows[ended & self.running()]
        self._ended[rows] = True
        self._lengths[rows] = step + 1
        self._running &= ~self._ended & (self._limits > step + 1)

    def completions(self) -> list[Completion]:
        """The completion of every row, in the order of the seeds."""
        tokens, logprobs = self.tokens.tolist(), self._logprobs.tolist()
        lengths, ended = self._lengths.tolist(), self._ended.tolist()
        routing: list[Tensor | None] = [None] * len(tokens)
        if self._prompts:
            parts = zip(self._prompts, self._experts, lengths, strict=True)
            routing = [torch.cat((prompt, experts[: length - 1])).cpu() for prompt, experts, length in parts]
        return [
            Completion(tuple(ids[:length]), tuple(values[:length]), "stop" if end else "length", routing=experts)
            for ids, values, length, end, experts in zip(tokens, logprobs, lengths, ended, routing, strict=True)
        ]
