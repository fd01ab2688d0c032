"""What a run needs of a GPU's memory, by purpose, computed from the model's shape before anything is loaded.

Tensors are counted as the code allocates them. What others allocate (CUDA, cuBLAS, vLLM) is measured, see the
constants.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from qerl_kernels import flash_attention_4
from qerl_kernels.attention import MAX_HEAD_SIZE, backward_splits, head_groups
from qerl_kernels.delta_rule import DELTA_CHUNK
from qerl_kernels.experts import GROUP_BYTES
from qerl_kernels.logprob import CHUNK_BYTES

from qerl_pl.models.families import PROJECTIONS
from qerl_pl.models.memory import GIB, GRADIENT, MASTER, pinned_bytes
from qerl_pl.models.shape import Shape

SAFETY_FACTOR = 1.1
"""Factor on estimated activations where "auto" chooses a mode: for fragmentation and small tensors."""
SMS = 132
"""Streaming multiprocessors of an H100 or H200, which flash attention's deterministic backward pass fills."""
CUDA_CONTEXT_GIB = 0.81
"""CUDA's context and libraries. Measured: rl_step_7b_nvfp4_1.md 0.809, rl_step_32b_nvfp4_1.md 0.872."""
ENGINE_BUFFERS_GIB = 0.2
"""Inputs, workspaces and the rotary table of vLLM, cuBLAS workspaces. Measured: "other tensors" of
rl_step_7b_nvfp4_1.md 0.199, of rl_step_32b_nvfp4_1.md 0.286."""
CUDA_GRAPHS_GIB = 0.31
"""CUDA graphs' private memory and cached blocks. Measured, for 8 sequences: rl_step_7b_nvfp4_1.md 0.311,
rl_step_32b_nvfp4_1.md 0.419."""
CONTEXT = "CUDA context"
PREFILL_TOKENS, LARGE_GPU_GIB = 8192, 70
"""Most tokens of vLLM's forward pass by default; twice as many on GPUs with more memory than this."""


# Activations ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """What determines the activations of a micro-batch."""

    tokens: int
    sequences: int = 1
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool | str = True
    """A value of `PolicyConfig.gradient_checkpointing` other than "auto"."""
    mlp_tile_tokens: int | None = None
    train_norms: bool = False
    rank: int = 0
    """Rank of the adapter; 0 without one."""
    full_finetuning: bool = False


def saved_bytes(shape: Shape, batch: MicroBatch) -> int:
    """What all layers save for the backward pass."""
    if batch.checkpointing == "offload":  # one that is copied away or has come back, and the next
        return min(2, shape.layers) * batch.dtype.itemsize * shape.hidden * batch.tokens
    return sum(_saved_bytes(kind, batch) for kind in shape.kinds)


def _saved_bytes(shape: Shape, batch: MicroBatch) -> int:
    """What layers with equal heads save for the backward pass."""
    size, tokens = batch.dtype.itemsize, batch.tokens
    if batch.checkpointing == "selective":
        attention = (1 + shape.gated) * shape.q_dim + (1 + shape.has_v) * shape.kv_dim
        if size == 2 and not (shape.soft_capped or _large_heads(shape)):  # flash attention's result and log-sum-exp
            attention += shape.q_dim + 2 * shape.heads
        products = shape.hidden + (0 if _tiles(shape, batch) else 2 * shape.intermediate_size)
        products += shape.hidden if shape.normed_outputs or shape.shared_size else 0  # a second last linear
        mixers = (shape.layers - shape.delta_layers) * attention
        if shape.delta is not None:
            mixers += shape.delta_layers * (shape.delta.mixed + shape.delta.values + 2 * shape.delta.heads)
        return size * (shape.layers * (shape.hidden + products) + mixers) * tokens
    if batch.checkpointing is True:
        return shape.layers * size * shape.hidden * tokens
    attention, delta = (_recomputed(shape, batch, mixer(shape, batch)) for mixer in (_attention, _delta_net))
    layers = (shape.layers - shape.delta_layers) * attention + shape.delta_layers * delta
    return shape.layers * size * shape.hidden * tokens + layers


def _tiles(shape: Shape, batch: MicroBatch) -> bool:
    """Whether the MLPs are in tiles; a mixture of experts never is."""
    return batch.mlp_tile_tokens is not None and batch.tokens > batch.mlp_tile_tokens and not shape.experts


def _recomputed(shape: Shape, batch: MicroBatch, mixer: int) -> int:
    """What a layer saves besides its input: both norms' results and the second's input, queries, keys, values, the
    result of attention, gate, up and their product, the low-rank products of the adapter, and inputs of norms of
    outputs; `mixer` is of attention, or of a gated delta net, by token."""
    size = batch.dtype.itemsize
    token = size * ((5 if shape.normed_outputs else 3) * shape.hidden + 7 * batch.rank) + mixer + 8
    token += 2 * 2 * 4 * shape.hidden if batch.train_norms else 0
    token += 0 if _tiles(shape, batch) else 3 * size * shape.intermediate_size
    return batch.tokens * token + _saved_scores(shape, batch)


def _large_heads(shape: Shape) -> bool:
    """Whether heads are too large for flash attention: memory-efficient attention takes them."""
    return shape.q_dim // shape.heads > MAX_HEAD_SIZE


def _attention(shape: Shape, batch: MicroBatch) -> int:
    """Queries, keys, values, result and log-sum-exp of a token; norms of heads save queries and keys, trained ones in
    float32."""
    size = batch.dtype.itemsize
    norms = (4 if batch.full_finetuning else size) * (shape.q_dim + shape.kv_dim) if shape.head_norms else 0
    norms += size * shape.kv_dim if shape.value_norm else 0
    gates = 2 * size * shape.q_dim if shape.gated else 0  # and what they multiply
    keys = shape.q_dim if _large_heads(shape) else shape.kv_dim  # repeated for each query's head
    return size * (2 * shape.q_dim + 2 * keys) + norms + gates + 4 * shape.heads


def _delta_net(shape: Shape, batch: MicroBatch) -> int:
    """What a gated delta net saves of a token: by what autograd saved in eight shapes on a CPU, within 2 %.

    The sequences have one length: shorter ones are padded to the longest.
    """
    if (net := shape.delta) is None:
        return 0
    heads = net.heads * (36 * net.key_size + 29 * DELTA_CHUNK) + net.key_size * net.values // 16
    return 2 * batch.dtype.itemsize * net.mixed + 16 * net.values + heads


def _attention_backward(shape: Shape, batch: MicroBatch) -> int:
    """What flash attention's backward pass adds to its inputs and the queries' gradient; see `varlen_attention`.

    Each call sums the queries' gradient in float32, in parts. Several queries share keys and values, whose gradients
    have one for each query first. In groups of heads keys, values and the call's results are copies, and
    gradients of keys and values are summed in float32. FlashAttention 4 sums all gradients in float32, each once.
    """
    size, tokens = batch.dtype.itemsize, batch.tokens
    heads, rounded, element = shape.heads, tokens + 128 * batch.sequences, shape.q_dim // shape.heads
    if shape.soft_capped:
        return size * tokens * 2 * (shape.q_dim + shape.kv_dim)
    if _large_heads(shape):  # of the result, of queries and repeated keys and values, and of those before
        return size * tokens * (4 * shape.q_dim + 2 * shape.kv_dim)
    if flash_attention_4.available(torch.device("cuda"), element):
        summed = shape.q_dim + (2 * shape.kv_dim if shape.kv_dim < shape.q_dim else 0)
        return 4 * rounded * (summed + 2 * heads) + size * tokens * 2 * shape.kv_dim
    groups = head_groups(heads, batch.sequences, -(-tokens // batch.sequences), SMS)
    parts = max(group * backward_splits(batch.sequences * group, SMS) for group in groups)
    sums = 4 * parts * rounded * element
    if len(groups) == 1:
        expanded = 2 * shape.q_dim if shape.kv_dim < shape.q_dim else 0
        return sums + size * tokens * (expanded + 2 * shape.kv_dim)
    # Gradient and result of attention, keys, values; gradients of queries, keys and values.
    return sums + tokens * (size * 7 * max(groups) * element + 2 * 4 * shape.kv_dim)


def _scores(shape: Shape, batch: MicroBatch) -> int:
    """Scores of a layer's attention that are in memory: of padded sequences, by head, query and key."""
    return shape.heads * batch.tokens * -(-batch.tokens // batch.sequences) if shape.soft_capped else 0


def _saved_scores(shape: Shape, batch: MicroBatch) -> int:
    """What plain attention saves of them: capped scores and weights in float32, and the weights in 16 bits."""
    size = batch.dtype.itemsize
    return _scores(shape, batch) * (8 + (size if size < 4 else 0))


def activation_bytes(shape: Shape, batch: MicroBatch) -> int:
    """Peak of a micro-batch's activations and their gradients, with logits, and with weights cast for a product."""
    return saved_bytes(shape, batch) + max(working_bytes(shape, batch).values())


def working_bytes(shape: Shape, batch: MicroBatch) -> dict[str, int]:
    """What is alive beside `saved_bytes` at the peak of each part of the update, by part.

    The parts are the MLP's and attention's backward pass in the last layer, and logits and losses.
    """
    kinds = [_working_bytes(kind, batch) for kind in shape.kinds]
    return {part: max(kind[part] for kind in kinds) for part in kinds[0]}


def _working_bytes(shape: Shape, batch: MicroBatch) -> dict[str, int]:
    """`working_bytes` of a model whose last layer has this shape."""
    size, tokens, width, hidden = batch.dtype.itemsize, batch.tokens, shape.intermediate_size, shape.hidden
    mixer = max(_attention(shape, batch), _delta_net(shape, batch))
    recomputed = 0 if batch.checkpointing is False else _recomputed(shape, batch, mixer)
    largest = max(rows * columns for rows, columns in shape.linears.values())
    # A dequantized weight, or a group of experts'; in full fine-tuning the low-precision copy, its gradient, and that
    # in float32. Tiles add up the gradients of all three of the MLP's weights.
    sums = 6 if _tiles(shape, batch) else 1
    weight = GROUP_BYTES if shape.experts else largest * (2 * size + 4 * sums if batch.full_finetuning else size)
    if _tiles(shape, batch):
        assert batch.mlp_tile_tokens is not None
        # The gradient to the MLP's result and to its input; a tile's gate and up, gradients, and its own ends.
        tile = size * (5 * width + 4 * hidden) * batch.mlp_tile_tokens
        mlp = recomputed + 2 * size * hidden * tokens + tile + weight
    else:
        # Gradients of gate, up and their product, which itself is free by then; of the layer's result.
        gate_up = 2 if batch.checkpointing == "selective" else 0  # are among what is saved
        gradients = recomputed + size * (hidden + (2 - gate_up) * width) * tokens
        # Inputs copied for experts, and their results.
        gradients += 2 * size * shape.top_k * hidden * tokens
        mlp = max(gradients, gradients - size * width * tokens + weight)
    attention = size * tokens * (2 * hidden + 2 * shape.q_dim) + tokens * _attention(shape, batch)
    attention += _attention_backward(shape, batch) + weight
    # Plain attention's backward pass has four float32 tensors of scores at once, of which some are saved ones.
    attention += 16 * _scores(shape, batch) - (_saved_scores(shape, batch) if batch.checkpointing is False else 0)
    parts = {"MLP": mlp, "attention": attention}
    if shape.delta is not None:  # of its gradients a third is alive at a time, as tensors counted on a CPU show
        held = _delta_net(shape, batch) * (3 if batch.checkpointing is False else 4) // 3
        parts["delta net"] = tokens * (2 * size * hidden + held) + weight
    # The last norm's input in float32 and its results; the predicting states and their gradients.
    head = (4 + 4 * size) * hidden * tokens + min(CHUNK_BYTES, size * shape.vocabulary * tokens)
    if batch.full_finetuning:  # the output layer's copy, its gradient in float32, and a chunk's
        head += (2 * size + 4) * shape.vocabulary * hidden
    return parts | {"logits": head}


# A run ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunMemory:
    """Bytes of a run by purpose, while the engine samples and while the policy is updated."""

    rollout: Mapping[str, float]
    update: Mapping[str, float]
    cpu: Mapping[str, float] = field(default_factory=dict)
    """Pinned memory of the CPU."""

    @property
    def peak(self) -> float:
        """Peak of the GPU's memory, in bytes."""
        return max(sum(self.rollout.values()), sum(self.update.values()))

    def table(self) -> list[tuple[str, float, float]]:
        """(purpose, GiB in the rollout, GiB in the update), the sums last."""
        names = dict.fromkeys([*self.rollout, *self.update])
        rows = [(name, self.rollout.get(name, 0.0) / GIB, self.update.get(name, 0.0) / GIB) for name in names]
        return [*rows, ("in all", sum(row[1] for row in rows), sum(row[2] for row in rows))]


@dataclass(frozen=True)
class RunPlan:
    """What determines a run's memory."""

    shape: Shape
    batch: MicroBatch
    """The longest micro-batch."""
    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    quantization: str = "nvfp4"
    targets: tuple[str, ...] = PROJECTIONS
    state_bytes: float = 8.0
    """Bytes of the optimizer's state for each trained weight."""
    step_bytes: float = 4.0
    """In addition during a step: `torch.optim.AdamW` takes the roots of all second moments at once."""
    engine: bool = True
    shares_weights: bool = True
    """Whether trainer and engine hold one copy of the base."""
    merges: bool = False
    """Whether the engine has merged copies of the linears, in 16 bits, while it samples."""
    engine_is_dense: bool = False
    """Whether the engine's copy has 16 bits (`TransformersEngine`)."""
    kv_cache_gib: float = 4.0
    kv_dtype: torch.dtype | None = None
    """Data type of keys and values; None for that of the activations."""
    sleeps: bool = True
    """Whether the engine releases keys and values during the update."""
    prompt_tokens: int = PREFILL_TOKENS
    """Tokens of all prompts of a rollout."""
    prefill_tokens: int = PREFILL_TOKENS
    """Most tokens of the engine's forward pass."""
    max_num_seqs: int = 256
    reference: bool = False
    """Whether full fine-tuning holds a second model, or a run that starts from an adapter a copy of it."""

    def sequence_kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys, values and states of a sequence."""
        return self.shape.sequence_kv_bytes(tokens, self.kv_dtype or self.batch.dtype, self.prefill_tokens)


def run_memory(plan: RunPlan) -> RunMemory:
    """Memory of a run: the peak of the rollout, of the update's passes, or of the optimizer's step."""
    shape, batch, size = plan.shape, plan.batch, plan.batch.dtype.itemsize
    full = batch.full_finetuning
    dense = size * (shape.linear_weights + shape.embedding_weights)
    base = shape.base_bytes(plan.quantization, batch.dtype)
    trained = (
        shape.linear_weights + shape.embedding_weights if full else shape.adapter_weights(batch.rank, plan.targets)
    )
    gradients = GRADIENT * trained
    held: dict[str, float] = {"base model": dense if full else base}
    if not plan.engine:
        held["base model"] = 0 if full else base
    elif not full and not plan.shares_weights:
        held["base model, the engine's copy"] = dense if plan.engine_is_dense else base
    elif not full and (unshared := shape.unshared_bytes()):
        held["base model, what the engine does not share"] = unshared
    held["trained weights"] = MASTER * trained
    if plan.engine and not full:
        held["trained weights"] += size * shape.engine_adapter_weights(batch.rank, plan.targets)
    if plan.reference:
        held["reference policy"] = dense if full else MASTER * trained
    held["optimizer states"] = plan.state_bytes * trained
    cuda = {CONTEXT: CUDA_CONTEXT_GIB * GIB}
    kv = {"keys and values": plan.kv_cache_gib * GIB} if plan.engine else {}
    if plan.merges and batch.rank:
        mlp = 3 * shape.layers * shape.hidden * shape.shared_size if shape.experts else shape.mlp_weights
        merged = shape.merged_weights(plan.targets) if plan.quantization == "none" else shape.attention_weights + mlp
        kv["engine: merged copies"] = float(size * merged)
    buffers = {"engine: buffers, CUDA graphs": (ENGINE_BUFFERS_GIB + CUDA_GRAPHS_GIB) * GIB} if plan.engine else {}
    prefill = {"engine: prefill and logits": _prefill(plan)} if plan.engine else {}
    rollout = {**held, **kv, **prefill, **buffers, **cuda}  # the gradients are freed before it
    saved, working = saved_bytes(shape, batch), max(working_bytes(shape, batch).values())
    # Gradients of earlier micro-batches; at the end low-precision ones beside them, and the optimizer's temporaries.
    before = gradients if plan.micro_batches > 1 else 0.0
    activations = before + saved + working
    last = gradients + max(0 if full else size * trained, plan.step_bytes * trained)
    if activations >= last:
        update = {
            **held,
            "gradients": before,
            "layer inputs and products": saved,
            "working memory of the update": working,
        }
    else:
        update = {**held, "gradients": gradients, "optimizer step": last - gradients}
    update |= {} if plan.sleeps else kv
    cpu = {}
    if batch.checkpointing == "offload":
        cpu["layer inputs"] = float(pinned_bytes(shape.layers, shape.hidden, batch.tokens, batch.dtype))
    return RunMemory(rollout, {**update, **buffers, **cuda}, cpu)


def _prefill(plan: RunPlan) -> float:
    """The engine's largest forward pass: gate and up with their product, or a gated delta net's projections and chunks;
    hidden states, a dense weight; sampled logits."""
    shape, size = plan.shape, plan.batch.dtype.itemsize
    tokens = min(plan.prompt_tokens, plan.prefill_tokens)
    dense = 0 if plan.quantization == "none" else size * 2 * shape.intermediate_size * shape.hidden
    mixer = 0
    if (net := shape.delta) is not None:  # q, k and v thrice, z and four results, products of two tokens, states
        mixer = 3 * net.mixed + net.heads * 3 * DELTA_CHUNK + net.values * (5 + net.key_size // DELTA_CHUNK)
    rows = max(3 * shape.intermediate_size, mixer) + 4 * shape.hidden
    return tokens * size * rows + dense + plan.max_num_seqs * shape.vocabulary * size


def longest_completion(plan: RunPlan, prompt: int, gib: float, sequences: int = 1) -> int:
    """Tokens of the longest completion that fits with a prompt of so many, `sequences` in a micro-batch; 0 for none.

    The engine's cache is as set, or holds one such sequence where that is more; engines other than vLLM hold a batch.
    """
    cached = plan.max_num_seqs if plan.engine_is_dense else 1

    def fits(length: int) -> bool:
        batch = replace(plan.batch, tokens=sequences * (prompt + length), sequences=sequences)
        cache = max(plan.kv_cache_gib, cached * plan.sequence_kv_bytes(prompt + length) / GIB)
        return run_memory(replace(plan, batch=batch, kv_cache_gib=cache)).peak <= gib * GIB

    high = 1
    while fits(high):
        high *= 2
    return bisect_left(range(1, high), True, key=lambda length: not fits(length))
