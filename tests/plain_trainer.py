"""Training as loops, for tests: rollout, rewards, update and AdamW, completion by completion.

With `plain_policy` and `plain_objective` this is the algorithm that the package is held to: written from the papers'
formulas and the documented rules of random streams, and sharing no code with `qerl_pl`. Nothing is batched, packed,
cached or resumed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, stdev

import torch
from plain_objective import Member, Question, Recipe, advantages, minibatch_loss
from plain_policy import PlainPolicy, Sample, Sampling, drawn, shuffled, stream_seed
from torch import Tensor


def parts(rows: list[int], count: int) -> list[list[int]]:
    """Rows in order, in so many parts as even as they can be, the longer ones first."""
    size, longer = divmod(len(rows), count)
    ends = [size * number + min(number, longer) for number in range(count + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


class PlainTrainer:
    """Trains a policy; what happened is in `journal`, `evaluations`, `metrics` and `states`."""

    def __init__(self, recipe: Recipe, policy: PlainPolicy, train: list[Question], validation: list[Question]) -> None:
        self.recipe, self.policy, self.train, self.validation = recipe, policy, train, validation
        self.per_epoch = len(train) // recipe.batch_size
        self.rollouts = self.per_epoch * recipe.max_epochs
        self.steps = self.rollouts * recipe.update_epochs * recipe.minibatches
        self.version = 0
        self.step = 0
        self.learned = 0
        """Steps that had a gradient."""
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in policy.trained.items()}
        self.journal: list[tuple[str, Sample]] = []
        """Every completion that was scored, in order, after its question's text: evaluation's and dropped ones too."""
        self.metrics: list[dict[str, float]] = []
        self.groups: list[int] = []
        """How many each rollout learned from."""
        self.evaluations: list[tuple[float, float]] = []
        """Share of the questions that are answered right, greedily and sampled."""
        self.states: list[dict[str, Tensor]] = []
        """What was trained, after each rollout."""

    def run(self) -> None:
        """Epochs of rollouts, with an evaluation before the first and after each epoch."""
        size = self.recipe.batch_size
        self.evaluate()
        for epoch in range(self.recipe.max_epochs):
            order = shuffled(len(self.train), stream_seed(self.recipe.data_seed, "order", epoch))
            for start in range(0, self.per_epoch * size, size):  # what fills no batch is left out
                self.rollout([self.train[index] for index in order[start : start + size]])
            self.evaluate()

    # The rollout ---------------------------------------------------------------------------------------------------

    def rollout(self, questions: list[Question]) -> None:
        """Sample until there are enough groups to learn from, and learn."""
        recipe, seen, kept = self.recipe, list[list[Member]](), list[list[Member]]()
        sigma = self.sigma()
        noise = self.policy.noise(sigma, recipe.seed, self.version)
        wanted = len(questions)
        for attempt in range(recipe.resample_rounds + 1):
            groups = [self.group(question, noise) for question in questions]
            seen += groups
            kept += [group for group in groups if recipe.resample_rounds == 0 or self.teaches(group)]
            used = {group[0].question.id for group in seen}
            free = {question.id: question for question in self.train if question.id not in used}
            stream = stream_seed(recipe.data_seed, "replacement", "resample", self.version, attempt)
            questions = [free[name] for name in drawn(list(free), wanted - len(kept), stream)]
            if not questions:
                break
        for group in kept:
            norm = recipe.more.get("advantage_norm", "group")
            found = advantages([member.total for member in group], recipe.algorithm, norm)
            for member, advantage in zip(group, found, strict=True):
                member.advantage = advantage
        self.groups.append(len(kept))
        learned = [member for group in kept for member in group]
        tried = [member for group in seen for member in group]
        metrics = self.sampling_metrics(tried, learned) | self.update(learned)
        metrics["completions/groups_dropped_frac"] = 1 - len(kept) / len(seen)
        metrics["aqn/sigma"] = sigma
        values = torch.cat(list(noise.values()))
        metrics["aqn/measured_std"] = torch.sqrt(((values - values.mean()) ** 2).mean()).item()
        self.metrics.append(metrics)
        self.states.append({name: parameter.detach().clone() for name, parameter in self.policy.trained.items()})
        self.version += 1

    def sigma(self) -> float:
        """Standard deviation of the noise: K stages over the planned rollouts, from sigma_start down to sigma_end."""
        recipe = self.recipe
        stage, stages = self.version * recipe.stages // self.rollouts, recipe.stages  # from 0
        if recipe.noiseless_first_stage:
            stage, stages = stage - 1, stages - 1
            if stage < 0:
                return 0.0
        return recipe.sigma_start * (recipe.sigma_end / recipe.sigma_start) ** (stage / (stages - 1))

    def group(self, question: Question, noise: Mapping[str, Tensor]) -> list[Member]:
        """The completions of one question, each by a stream of (seed, policy version, question, number)."""
        members = []
        for number in range(self.recipe.group_size):
            seed = stream_seed(self.recipe.seed, "rollout", self.version, question.id, number)
            sample = self.policy.sample(question.tokens, seed, self.recipe.sampling, noise)
            members.append(self.scored(question, sample))
        return members

    def scored(self, question: Question, sample: Sample) -> Member:
        """A completion with its rewards."""
        self.journal.append((question.text, sample))
        values = {name: value(sample) for name, (_, value) in self.recipe.rewards.items()}
        total = sum(weight * values[name] for name, (weight, _) in self.recipe.rewards.items())
        return Member(question, sample, values, total)

    def unscored(self, question: Question, sample: Sample) -> Member:
        """A completion that is measured alone."""
        return Member(question, sample, {}, math.nan)

    def is_right(self, member: Member) -> bool:
        """Whether the first reward calls a completion right."""
        return member.rewards[next(iter(self.recipe.rewards))] > 0.5

    def teaches(self, group: list[Member]) -> bool:
        """Whether dynamic sampling keeps a group: some but not all answers are right, and the totals differ."""
        right = sum(self.is_right(member) for member in group)
        return 0 < right < len(group) and len({round(member.total, 6) for member in group}) > 1

    def sampling_metrics(self, tried: list[Member], learned: list[Member]) -> dict[str, float]:
        """Rewards of all that was sampled, lengths of what is learned from."""
        totals, lengths = [member.total for member in tried], [len(member.sample.tokens) for member in learned]
        metrics = {f"reward/{name}": fmean(member.rewards[name] for member in tried) for name in self.recipe.rewards}
        return metrics | {
            "reward/mean": fmean(totals),
            "reward/std": stdev(totals),
            "completions/sampled_tokens": sum(len(member.sample.tokens) for member in tried),
            "completions/length_mean": fmean(lengths),
            "completions/length_max": max(lengths),
            "completions/truncated_frac": fmean(member.sample.truncated for member in learned),
        }

    # The update ----------------------------------------------------------------------------------------------------

    def update(self, members: list[Member]) -> dict[str, float]:
        """Epochs of minibatches; log-probabilities of the old policy and of the reference are taken once, before."""
        recipe, sums, steps = self.recipe, defaultdict[str, float](float), list[dict[str, float]]()
        for member in members:
            with torch.no_grad():
                member.old = self.token_logprobs(member)[0].tolist()
                member.reference = self.token_logprobs(member, adapter=False)[0].tolist()
        for epoch in range(recipe.update_epochs):
            order = shuffled(len(members), stream_seed(recipe.seed, "minibatches", self.version, epoch))
            for rows in parts(order, recipe.minibatches):
                chosen = [members[row] for row in rows]
                loss = minibatch_loss(recipe, chosen, self.token_logprobs, sums)
                rate = self.learning_rate()
                norm = self.learn(loss, rate) if loss.requires_grad else 0.0  # all truncated: nothing changes
                self.step += 1
                steps.append({"optim/loss": loss.item(), "optim/lr": rate, "optim/grad_norm": norm})
        metrics = {tag: fmean(step[tag] for step in steps) for tag in steps[0]}
        squares = sums.pop("weights squared")
        metrics["mismatch/ess"] = sums["mismatch/is_weight_mean"] ** 2 / (sums["tokens"] * squares)
        tokens = sums.pop("tokens")
        return metrics | {tag: value / tokens for tag, value in sums.items()}

    def token_logprobs(self, member: Member, adapter: bool = True) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a completion's tokens at the temperature of the sampling."""
        return self.policy.token_logprobs(
            member.question.tokens, member.sample.tokens, self.recipe.sampling.temperature, adapter
        )

    def learning_rate(self) -> float:
        """From 0 up to the peak over the warm-up, then half a cosine down to 0 at the planned end."""
        warmup = round(self.recipe.warmup_ratio * self.steps)
        if self.step < warmup:
            return self.recipe.lr * self.step / warmup
        return self.recipe.lr * (1 + math.cos(math.pi * (self.step - warmup) / (self.steps - warmup))) / 2

    def learn(self, loss: Tensor, rate: float) -> float:
        """One step of AdamW with the gradient shortened to max_grad_norm; returns the gradient's norm before."""
        recipe = self.recipe
        gradients = torch.autograd.grad(loss, list(self.policy.trained.values()))
        norm = math.sqrt(sum((gradient**2).sum().item() for gradient in gradients))
        factor = min(1.0, recipe.max_grad_norm / (norm + 1e-6))
        self.learned += 1
        for (name, parameter), gradient in zip(self.policy.trained.items(), gradients, strict=True):
            first, second = self.moments[name]
            first = recipe.betas[0] * first + (1 - recipe.betas[0]) * factor * gradient
            second = recipe.betas[1] * second + (1 - recipe.betas[1]) * (factor * gradient) ** 2
            self.moments[name] = first, second
            mean = first / (1 - recipe.betas[0] ** self.learned)
            spread = torch.sqrt(second / (1 - recipe.betas[1] ** self.learned))
            with torch.no_grad():
                parameter *= 1 - rate * recipe.weight_decay
                parameter -= rate * mean / (spread + recipe.eps)
        return norm

    # Evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Held-out questions without noise, greedily and at temperature 1, by the same streams each time."""
        recipe = self.recipe
        shares = []
        for temperature, count in ((0.0, 1), (1.0, recipe.eval_samples)):
            sampling = Sampling(recipe.sampling.max_tokens, temperature, recipe.sampling.stop)
            right = []
            for question in self.validation:
                for number in range(count):
                    seed = stream_seed(recipe.seed, "evaluation", question.id, number)
                    sample = self.policy.sample(question.tokens, seed, sampling)
                    right.append(self.is_right(self.scored(question, sample)))
            shares.append(fmean(right))
        self.evaluations.append((shares[0], shares[1]))
