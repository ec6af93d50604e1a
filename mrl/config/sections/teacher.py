"""Section `teacher`: on-policy distillation."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.models import ParallelConfig
from mrl.options.base import FilePath, InnerFraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, Url


class TeacherModelConfig(Section):
    """A frozen model that teaches the prompts of one data source. It must have the actor's tokenizer."""

    path: FilePath  # Hugging Face directory; with url its config.json and tokenizer files suffice
    url: Url | None = None  # running engine that serves the teacher; null: the trainer computes it
    api_key_file: FilePath | None = None  # file with the API key of the engine at url, readable by its owner only
    parallel: ParallelConfig | None = None  # layout; null: the actor's
    offload: Literal["none", "all"] = "none"  # all: keep parameters in host memory while they are not needed


class TeacherConfig(Section):
    """On-policy distillation: the actor's own responses are trained by a divergence per token between its distribution
    q and that of a larger, frozen model p, in addition to the policy loss.

    Adds to the actor's loss: coef * the divergence, over the whole vocabulary at the temperature of the samples,
    aggregated like the policy loss. With url, the outcomes are the teacher's top_k tokens and "any other token".

    - reverse_kl: KL(q || p); forward_kl: KL(p || q)
    - jsd: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (GKD, arXiv 2306.13649)
    - skewed_kl: KL(p || skew p + (1 - skew) q); skewed_reverse_kl: KL(q || (1 - skew) p + skew q) (DistiLLM, arXiv
      2402.03898)
    - sampled: adds nothing to the loss, but coef * (log p - log q) of the sampled token to its advantage
    """

    # Hugging Face directory of the only teacher; it must have the actor's tokenizer. With url its config.json and
    # tokenizer files suffice
    path: FilePath | None = None
    url: Url | None = None  # running engine that serves the only teacher; null: the trainer computes it
    api_key_file: FilePath | None = None  # file with the API key of the engine at url, readable by its owner only
    parallel: ParallelConfig | None = None  # layout of the only teacher; null: the actor's
    # all: keep the only teacher's parameters in host memory while they are not needed
    offload: Literal["none", "all"] = "none"
    teachers: dict[str, TeacherModelConfig] = {}  # value of data.data_source_key -> its teacher, instead of `path`
    # divergence between actor and teacher; see the section
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "skewed_kl", "skewed_reverse_kl", "sampled"] = "reverse_kl"
    beta: InnerFraction = 0.5  # the teacher's share of m; jsd only
    # how far the second distribution moves towards the first; skewed_kl and skewed_reverse_kl only
    skew: InnerFraction = 0.1
    coef: PositiveFloat = 1.0  # weight of the divergence
    policy_coef: NonNegativeFloat = 1.0  # weight of the policy loss; 0: learn from the teacher alone
    top_k: PositiveInt = 32  # most likely tokens that engines at url report for each token; not with sampled
    concurrent_requests: PositiveInt = 64  # sequences in flight at once to each engine at url
    timeout_s: PositiveFloat = 300.0  # maximum seconds until an engine at url has scored one sequence

    @property
    def mix(self) -> float:
        """The parameter of the divergence."""
        return self.beta if self.divergence == "jsd" else self.skew

    @property
    def models(self) -> dict[str, TeacherModelConfig]:
        """The teachers, by the section of each one's keys."""
        if self.path is not None:
            own = {name: value for name, value in self if name in TeacherModelConfig.model_fields}
            return {"teacher": TeacherModelConfig(**own)}
        return {f"{SOURCES}.{source}": model for source, model in self.teachers.items()}


SOURCES = "teacher.teachers"
