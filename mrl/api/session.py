"""Sessions: models, engines and weight sync for training loops of your own. Every call is collective."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from mrl.api import inputs
from mrl.api.trainers import RLTrainer
from mrl.config.problems import Problem
from mrl.config.schema import RLConfig, TeacherConfig
from mrl.config.trainers.base import AnyConfig
from mrl.core import Prompt, Request, Rollout, Sample, SamplingParams, StepStats
from mrl.data import collate
from mrl.data.encoder import Encoder
from mrl.inference.seeds import sample_seed
from mrl.kernels.linear_divergence import Divergence
from mrl.learner import Learner, losses
from mrl.learner.loss_terms import Distillation, Loss, LossParts
from mrl.trainers.rl.distillation import log_probs_of_teachers, states_in
from mrl.trainers.rl.run import RLRun

PromptLike = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True)
class LossBatch:
    """The response tokens of one micro-batch, for a loss function.

    rollout: all samples of the update
    indices [n] int64: the micro-batch's tokens in the flat vectors [R] of `rollout`; n may be 0
    """

    rollout: Rollout
    indices: Tensor

    def take(self, values: Tensor) -> Tensor:
        """Returns [n]: the values of the micro-batch's tokens, on their device. values: flat [R], or one for each
        response token as [batch, response_len]."""
        flat = values if values.dim() == 1 else self.rollout.flat(values)
        return flat.to(self.indices.device)[self.indices]


PolicyLoss = Callable[[Tensor, Tensor, LossBatch], tuple[Tensor, Tensor | float]]
ValueLoss = Callable[[Tensor, LossBatch], tuple[Tensor, Tensor | float]]


class _Model:
    """A trained model of a session."""

    def __init__(self, run: RLRun, learner: Learner, phase: str) -> None:
        self._run, self._learner, self._phase = run, learner, phase

    def optim_step(self) -> dict[str, float]:
        """Applies one optimizer update from the gradients of the last `update`.

        Returns:
            grad_norm, lr and skipped: 1 if the loss or a gradient was not finite, so that nothing changed.
        """
        return self._learner.step()

    def _update(
        self,
        rollout: Rollout,
        loss: Callable[[Tensor, LossBatch], tuple[Tensor, Tensor | float]],
        entropy_grad: bool,
        distillation: Distillation | None = None,
    ) -> dict[str, float]:
        """Computes the gradients of the sum of all micro-batches' sums, over the sum of their denominators."""

        def compute(output: Tensor, dest: Tensor) -> LossParts:
            total, denominator = loss(output, LossBatch(rollout, dest))
            return LossParts(total, [torch.as_tensor(denominator, device=total.device).detach()])

        whole = Loss(compute, ("denominator",))
        if distillation is not None:
            means = torch.full((rollout.num_response_tokens,), 1 / rollout.num_response_tokens)
            whole = losses.distilled(whole, distillation, {"distill/kl": means})
        self._run.memory.begin(self._phase)
        found = self._learner.backward(
            rollout,
            range(rollout.num_samples),
            whole,
            self._run.cfg.rollout.sampling.temperature,
            entropy_grad=entropy_grad,
        )
        denominator = found.pop("denominator")
        if denominator <= 0:
            raise ValueError(f"the denominators of a loss function must have a positive sum, got {denominator:g}")
        self._learner.scale_gradients(1 / denominator)
        return found | {"loss": found["loss"] / denominator}


class Policy(_Model):
    """The actor. Log-probs are of softmax(logits / rollout.sampling.temperature)."""

    def log_probs(self, rollout: Rollout) -> Tensor:
        """Returns the log-probs of all response tokens under the present weights, flat [R] float32."""
        self._run.memory.begin("experience")
        return self._learner.log_probs(rollout, self._run.cfg.rollout.sampling.temperature)[0]

    def update(self, rollout: Rollout, loss_fn: PolicyLoss, *, entropy_grad: bool = False) -> dict[str, float]:
        """Computes the gradients of a loss over all samples of a rollout.

        The loss is the sum of the first results of `loss_fn` over all micro-batches of all ranks, divided by the sum of
        the second ones. The gradients therefore do not depend on the layout. With a teacher, unless its divergence is
        "sampled", the first sum is teacher.policy_coef times that, plus teacher.coef times the divergences of all
        response tokens.

        Args:
            rollout: the samples, equal on every rank.
            loss_fn: (log_probs [n] with gradient, entropy [n], batch) -> (sum over the n tokens, denominator).
            entropy_grad: the loss depends on the entropies, which have no gradient otherwise.

        Returns:
            loss, and with such a teacher distill/kl, the mean divergence.

        Raises:
            ValueError: the denominators are 0 together.
        """
        teacher, policy_coef, distillation = self._run.cfg.teacher, 1.0, None
        if teacher is not None and teacher.divergence != "sampled":
            samples, policy_coef = range(rollout.num_samples), teacher.policy_coef
            states = states_in(self._run, teacher, rollout, [samples])[tuple(samples)]
            weights = torch.full((rollout.num_response_tokens,), teacher.coef)
            distillation = Distillation(states, Divergence(teacher.divergence, teacher.mix), weights)

        def loss(output: Tensor, batch: LossBatch) -> tuple[Tensor, Tensor | float]:
            total, denominator = loss_fn(output[0], output[1], batch)
            return policy_coef * total, denominator

        return self._update(rollout, loss, entropy_grad, distillation)


class Critic(_Model):
    """The critic."""

    def values(self, rollout: Rollout) -> Tensor:
        """Returns the value before each response token, flat [R] float32."""
        self._run.memory.begin("experience")
        return self._learner.values(rollout)

    def update(self, rollout: Rollout, loss_fn: ValueLoss) -> dict[str, float]:
        """Computes the gradients of a loss, as `Policy.update` does.

        Args:
            rollout: the samples, equal on every rank.
            loss_fn: (values [n] with gradient, batch) -> (sum over the n tokens, denominator).

        Returns:
            loss.
        """
        return self._update(rollout, lambda output, batch: loss_fn(output[0], batch), False)


class Reference:
    """The frozen reference policy."""

    def __init__(self, run: RLRun) -> None:
        self._run = run

    def log_probs(self, rollout: Rollout) -> Tensor:
        """Returns the log-probs of all response tokens, flat [R] float32."""
        assert self._run.ref is not None
        self._run.memory.begin("experience")
        return self._run.ref.log_probs(rollout, self._run.cfg.rollout.sampling.temperature)[0]


class Teacher:
    """The teacher of `teacher.path`."""

    def __init__(self, run: RLRun, cfg: TeacherConfig) -> None:
        self._run, self._cfg = run, cfg

    def log_probs(self, rollout: Rollout) -> Tensor:
        """Returns the log-probs of all response tokens, flat [R] float32."""
        return log_probs_of_teachers(self._run, self._cfg, rollout)


class _SessionTrainer(RLTrainer):
    def _check(self, cfg: AnyConfig) -> Iterator[Problem]:
        problems = list(super()._check(cfg))
        yield from problems
        if problems:  # it may be of another trainer
            return
        rl = cast(RLConfig, cfg)
        if rl.teacher is not None and rl.teacher.teachers:
            message = "a session's samples have no data source, so they have one teacher: use teacher.path"
            yield Problem(("teacher.teachers",), message)
        loop = {
            "agent": rl.agent is not None,
            "ema": rl.ema is not None,
            "replay": rl.replay is not None,
            "ptx": rl.ptx is not None,
            "ref.policy": rl.ref.policy != "frozen",
            "critic.warmup_steps": rl.critic is not None and rl.critic.warmup_steps > 0,
            "rollout.max_staleness": rl.rollout.max_staleness > 0,
            "rollout.interrupt": rl.rollout.interrupt != "never",
            "rollout.early_passes": rl.rollout.early_passes is not None,
        }
        for key in (key for key, is_set in loop.items() if is_set):
            yield Problem((key,), "has no effect in a session, whose loop is your own: leave it out")
        if rl.adapters:
            message = "a session trains one policy: remove the section, or train with mrl.RLTrainer(...).fit()"
            yield Problem(("adapters",), message)


def _merged(own: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with further keys, section by section."""
    found = dict(own)
    for key, value in further.items():
        inner = found.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(cast(Mapping[str, Any], inner), value) if both else value
    return found


class SessionEngine:
    """The rollout engines. Rank 0 talks to them."""

    def __init__(self, run: RLRun) -> None:
        self._run, self._calls = run, run.start_step

    def generate(
        self, prompts: Sequence[PromptLike], sampling: SamplingParams | None = None, n: int = 1
    ) -> list[Sample]:
        """Generates responses by the weights of the last `sync`.

        Args:
            prompts: texts, conversations (lists of messages, with data.chat_template), or rows of data.
            sampling: None: as `rollout.sampling` says. Responses end at the tokenizer's EOS in any case.
            n: responses to each prompt.

        Returns:
            The samples, n for each prompt in their order, equal on every rank. Set `sample.score` on every rank.

        Raises:
            RankZeroError: an engine failed.
        """
        run, call = self._run, self._calls
        self._calls += 1
        run.memory.begin("rollout")
        return run.world.from_main("generating", lambda: self._generate(prompts, sampling, n, call))

    def _generate(
        self, prompts: Sequence[PromptLike], sampling: SamplingParams | None, n: int, call: int
    ) -> list[Sample]:
        run, generator = self._run, self._run.generator
        assert generator is not None
        params = generator.sampling_params()
        if sampling is not None:
            stops = (*sampling.stop_token_ids, *params.stop_token_ids)
            params = replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops)))
        encoder, key = Encoder(run.cfg.data, generator.tokenizer), run.cfg.data.prompt_key
        rows = [dict(prompt) if isinstance(prompt, Mapping) else {key: prompt} for prompt in prompts]
        rendered = [encoder.render(row) for row in rows]
        made = [
            Prompt(number, tuple(ids), row, each.text)
            for number, (ids, row, each) in enumerate(zip(encoder.ids(rendered), rows, rendered, strict=True))
        ]
        seed = run.cfg.run.seed
        requests = [Request(i, i // n, made[i // n], sample_seed(seed, call, i)) for i in range(len(made) * n)]
        samples = generator.engine.generate(requests, params, generator.is_active)
        for sample, text in zip(samples, generator.tokenizer.decode_all([each.response_ids for each in samples])):
            sample.response_text = text
        return samples


class Session:
    """Models, engines and weight sync of an RL configuration, for a loop of your own.

    Use it as a context manager. It runs in one process, or on every rank under torchrun. Every method is collective:
    call it on every rank with the same arguments.

    Args:
        config: a configuration with `trainer: rl`: a YAML file, its content as a dict, or an object. `critic` and the
            keys of `algorithm.kl` decide whether there are a critic and a reference.

    Attributes:
        policy: the actor
        critic: None without a critic
        ref: None without a KL term
        teacher: None without the section `teacher`
        engine: the rollout engines
        num_steps: number of `sync` calls, and of the checkpoint that the session has resumed from
        is_main: True on rank 0
    """

    policy: Policy
    critic: Critic | None
    ref: Reference | None
    teacher: Teacher | None
    engine: SessionEngine

    def __init__(self, config: str | Path | Mapping[str, Any] | AnyConfig) -> None:
        self._trainer = _SessionTrainer(config)
        self._temporary: Path | None = None
        self.num_steps = 0

    @classmethod
    def from_model(
        cls,
        path: str | Path,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        lr: float = 1e-6,
        dtype: str = "bfloat16",
        max_prompt_tokens: int = 256,
        max_new_tokens: int = 256,
        engine: str = "sglang",
        root: str | Path | None = None,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Returns a session from a model directory alone.

        Args:
            path: Hugging Face directory of the actor.
            tensor: tensor-parallel size.
            pipeline: pipeline-parallel size.
            lr: learning rate of the actor.
            dtype: dtype of the weights.
            max_prompt_tokens: most tokens of a prompt.
            max_new_tokens: most tokens of a response.
            engine: rollout engine, sglang or transformers.
            root: directory of the run directory, needed for `save`; None: a temporary one.
            sections: further keys of the configuration, by section. They replace what the other arguments set.

        Returns:
            The session, to be entered.
        """
        run_dir = Path(tempfile.gettempdir(), f"mrl-{os.getuid()}-{os.environ.get('MASTER_PORT', os.getpid())}")
        run_dir = run_dir if root is None else Path(root) / "session"
        prompts = int(os.environ.get("WORLD_SIZE", 1))  # of a step that is never taken, like the rows and the reward
        rows = inputs.write_rows(
            [{"prompt": "-", "answer": "-"}] * prompts, inputs.make_folder(run_dir) / "train.jsonl"
        )
        config: dict[str, dict[str, Any]] = {
            "run": {"name": run_dir.name, "root": str(run_dir.parent), "existing": "move_aside", "trackers": []},
            "model": {"path": str(path), "dtype": dtype},
            "actor": {"parallel": {"tensor": tensor, "pipeline": pipeline}, "optimizer": {"lr": lr}},
            "data": {"train": str(rows), "max_prompt_tokens": max_prompt_tokens},
            "batch": {"prompts_per_step": prompts, "samples_per_prompt": 2},
            "rollout": {"engine": engine, "sampling": {"max_new_tokens": max_new_tokens}},
            "reward": {"function": "exact_match", "workers": 1},
            "algorithm": {"adv_estimator": "grpo"},
        }
        session = cls(_merged(config, sections or {}))
        session._temporary = run_dir if root is None else None
        return session

    def __enter__(self) -> Self:
        run = self._run = self._trainer.init_workers()._loop.run
        self.num_steps, self.is_main = run.start_step, run.world.is_main
        self.policy = Policy(run, run.actor, "actor_update")
        self.critic = Critic(run, run.critic, "critic_update") if run.critic is not None else None
        self.ref = Reference(run) if run.ref is not None else None
        self.teacher = Teacher(run, run.cfg.teacher) if run.cfg.teacher is not None else None
        self.engine = SessionEngine(run)
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer.__exit__(*error)
        if self._temporary is not None and self.is_main:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._temporary)

    def batch(self, samples: Sequence[Sample]) -> Rollout:
        """Returns samples of one `generate` call with their scores as flat tensors.

        Raises:
            ValueError: a sample is missing or has no tokens.
        """
        return collate(self.num_steps, list(samples))

    def sync(self) -> dict[str, float]:
        """Gives the engines the actor's weights, and counts a step. Returns the metrics of the weight sync."""
        self.num_steps += 1
        self._run.memory.begin("sync")
        return self._run.sync_weights(self.num_steps).metrics()

    def save(self, step: int | None = None, *, export: bool = False) -> Path:
        """Saves a checkpoint of all trained models, from which a session with this configuration resumes.

        Args:
            step: its number; None: `num_steps`.
            export: also write the weights to RUN_DIR/hf_step_N.

        Returns:
            The path of the complete checkpoint.
        """
        return self._run.checkpointer.save(self.num_steps if step is None else step, export=export)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Writes a row of RUN_DIR/metrics.jsonl, and to the trackers."""
        self._run.recorder.log(StepStats(self.num_steps, dict(metrics)))
