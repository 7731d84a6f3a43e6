"""Teach a small model to add by GRPO: `python examples/grpo.py --steps 60`.

A model of 60,000 parameters learns to write sums of two digits as text. Supervised steps come
first, on data in which half of the answers are wrong. Then, in each step, the engine samples
several answers to each question, an answer is rewarded if it is right, and the policy is trained on
advantages within each group (Shao et al. 2024, arXiv:2402.03300): the reward less the mean of its
group, over its standard deviation.

Trainer and engine share devices. Weights go to the engine without a file. In strict mode, the
default, the log-probabilities of samples are computed by the trainer's own program, so that the KL
divergence between sampler and trainer is exactly 0; `--no-strict` takes the engine's.
"""

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshwright.data import load_tokenizer
from meshwright.serving import (
    Engine,
    EngineConfig,
    Replicas,
    Request,
    Sampling,
    Source,
    generation_mesh,
    start_engine,
    trained_weights,
)
from meshwright.training import (
    Sample,
    TrainConfig,
    TrainState,
    abstract_step,
    by_target,
    new_state,
    sample_batch,
    train_on,
)
from meshwright.training.optimizer import OptimizerConfig

MODEL = ("vocab=257", "layers=2", "embed=48", "heads=4", "kv_heads=4", "head_dim=12", "mlp=96")
GROUP, QUESTIONS, SEQ = 8, 16, 16
ONE = "dp=1,fsdp=1,tp=1,sp=1"
ANSWER = 3  # most tokens: two digits and the end of the text
TOKENIZER = load_tokenizer("bytes")


class Report(NamedTuple):
    """A step of GRPO."""

    reward: float
    kl: float  # of the sampler from the trainer, by the samples
    difference: float  # the largest between their log-probabilities
    clipped: float  # part of the sampled tokens whose ratio is clipped in the last update


def question(random: np.random.Generator) -> tuple[tuple[int, ...], str]:
    """A prompt and its right answer."""
    a, b = random.integers(0, 10, 2)
    return tuple(TOKENIZER.encode(f"{a}+{b}=").tolist()), str(a + b)


def clipped_loss(new: Any, old: Any, advantages: Any, sampled: Any, clip: float = 0.2) -> Any:
    """The loss of PPO and GRPO, a mean over the sampled tokens."""
    ratio = jnp.exp(new - old)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages)
    return -jnp.sum(gain * sampled) / jnp.sum(sampled)


def group_advantages(rewards: Any) -> Any:
    """Of rewards [questions, group]: those of each group with mean 0 and deviation 1."""
    deviation = rewards.std(axis=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + 1e-4)


def kl_divergence(sampler: Any, trainer: Any) -> float:
    """KL(sampler || trainer) by log-probabilities of samples: Schulman's k3, never negative."""
    difference = np.float64(trainer) - np.float64(sampler)
    return float(np.mean(np.expm1(difference) - difference))


@dataclasses.dataclass
class Grpo:
    """A policy with its trainer and its engine."""

    step: Any
    state: TrainState
    engine: Engine | Replicas
    random: np.random.Generator
    strict: bool

    def train_step(self, updates: int) -> Report:
        """Sample answers, reward them, and update the policy on them."""
        step = self.step
        samples, rewards, by_engine = self._sampled()
        batch = sample_batch(step, samples)
        old = by_target(step, samples, by_engine)
        if self.strict:
            old = step.functions.log_probs(self.state.params, batch)
        advantages = by_target(step, samples, group_advantages(rewards).reshape(-1))
        sampled = by_target(step, samples, np.ones(len(samples)))
        reports = []
        for _ in range(updates):
            self.state, report = train_on(
                step, self.state, batch, lambda new: clipped_loss(new, old, advantages, sampled)
            )
            reports.append(report)
        counts = np.asarray(sampled) > 0
        seen = old, reports[0]["log_probs"], reports[-1]["log_probs"]
        sampler, first, last = (np.asarray(x)[counts] for x in seen)
        return Report(
            float(rewards.mean()),
            kl_divergence(sampler, first),
            float(np.abs(first - sampler).max()),
            float((np.abs(np.exp(last - sampler) - 1) > 0.2).mean()),
        )

    def _sampled(self) -> tuple[list[Sample], Any, list[Any]]:
        """Samples, their rewards [questions, group], and the engine's log-probabilities."""
        self.engine.update_weights(self.state.params, self.step.compute.adapter_scale)
        asked = [question(self.random) for _ in range(QUESTIONS)]
        seeds = self.random.integers(0, 2**32, (QUESTIONS, GROUP))
        requests = [
            Request(prompt, Sampling(temperature=1.0, seed=int(seed)), ANSWER, logprobs=0)
            for (prompt, _), row in zip(asked, seeds, strict=True)
            for seed in row
        ]
        done = self.engine.generate(requests)
        rights = [answer for _, answer in asked for _ in range(GROUP)]
        rewards = [
            float(one.finish_reason == "stop" and one.text == right)
            for one, right in zip(done, rights, strict=True)
        ]
        samples = [(one.prompt, answer.tokens) for one, answer in zip(requests, done, strict=True)]
        logprobs = [[token.logprob for token in one.logprobs] for one in done]
        return samples, np.reshape(rewards, (QUESTIONS, GROUP)), logprobs


def trainer(seed: int, mesh: str, learning_rate: float) -> Any:
    """The train step of the policy, with AdamW at a constant rate."""
    optimizer = OptimizerConfig(
        learning_rate=learning_rate, schedule="constant", warmup_steps=5, weight_decay=0.0
    )
    config = TrainConfig(
        "tiny", override=MODEL, batch=GROUP * QUESTIONS, seq=SEQ, seed=seed,
        optimizer=optimizer,
    )  # fmt: skip
    return abstract_step(config, generation_mesh(mesh))


def supervised_params(step: Any, seed: int, steps: int) -> Any:
    """Parameters after supervised steps on answers of which half are wrong."""
    random = np.random.default_rng([seed, 1])
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh, seed)
    for _ in range(steps):
        samples = []
        for wrong in random.random(GROUP * QUESTIONS) < 0.5:
            prompt, answer = question(random)
            answer = str(random.integers(0, 19)) if wrong else answer
            samples.append((prompt, [*TOKENIZER.encode(answer), TOKENIZER.end_of_document]))
        state, _ = step.functions.train(state, sample_batch(step, samples))
    return state.params


def start(seed: int, supervised: int, mesh: str = ONE, strict: bool = True) -> Grpo:
    """A policy after supervised steps, with an engine on the mesh of its trainer."""
    params = supervised_params(trainer(seed, mesh, 3e-3), seed, supervised)
    step = trainer(seed, mesh, 5e-4)
    state = new_state(step.arrays, step.state, step.optimizer, step.mesh, params=params)
    source = Source(
        step.model, TOKENIZER, frozenset({TOKENIZER.end_of_document}), False, "the policy",
        trained_weights(params),
    )  # fmt: skip
    most = GROUP * QUESTIONS
    settings = EngineConfig(
        max_batch=most, max_length=SEQ, page_size=8, batch_buckets=(most,),
        chunk_shapes=((most, 8),), prompt_logprobs=False, compile_first=False,
    )  # fmt: skip
    engine = start_engine(source, step.mesh, step.compute.dtype, settings)
    return Grpo(step, state, engine, np.random.default_rng(seed), strict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO")
    parser.add_argument("--supervised", type=int, default=200, help="supervised steps before them")
    parser.add_argument("--updates", type=int, default=2, help="updates on each batch of samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default=ONE, help="of trainer and engine")
    parser.add_argument(
        "--strict", action=argparse.BooleanOptionalAction, default=True,
        help="log-probabilities of samples by the trainer's own program",
    )  # fmt: skip
    options = parser.parse_args()
    policy = start(options.seed, options.supervised, options.mesh, options.strict)
    with policy.engine:
        for number in range(1, options.steps + 1):
            report = policy.train_step(options.updates)
            print(
                f"step {number}: reward {report.reward:.3f}, KL(sampler, trainer) {report.kl:.3g}, "
                f"largest difference {report.difference:.3g}, clipped {report.clipped:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
