"""Every key a YAML file can hold, typed and frozen. Sizes carry their unit in the name.

The loader (`mrl.config.loader`) turns YAML into these classes and reports every mistake at once with file and line;
cross-field rules live in `mrl.config.checks`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ParallelConfig(Section):
    """A layout. Data parallelism is what is left: world size / (tensor * pipeline * context)."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None  # of the experts; null: `tensor` when expert is 1, else 1
    virtual_pipeline: PositiveInt | None = None  # model chunks a pipeline stage
    first_stage_layers: PositiveInt | None = None  # uneven pipeline split
    last_stage_layers: PositiveInt | None = None
    sequence: bool = True  # sequence parallelism wherever tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; linear warm-up from 0 over `warmup_steps` updates, then `decay`."""

    lr: NonNegativeFloat = 1e-6
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: PositiveInt | None = None  # updates until `min_lr`, warm-up included
    min_lr: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: PositiveFloat = 1.0


class TrainConfig(Section):
    """How one model is laid out and trained."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 16384
    recompute: Literal["none", "selective", "full"] = "none"


class CriticConfig(TrainConfig):
    path: str | None = None  # Hugging Face directory; the actor's when null
    warmup_steps: NonNegativeInt = 0  # steps in which only the critic is trained
    frozen: bool = False  # never trained: a zero baseline, for comparisons


class RefConfig(Section):
    """The frozen reference policy; built only if a KL term asks for it. Layout as the actor's when null."""

    path: str | None = None  # the actor's initial weights when null
    parallel: ParallelConfig | None = None
    max_tokens_per_microbatch: PositiveInt | None = None


class ModelConfig(Section):
    path: str  # Hugging Face directory: config.json, tokenizer, safetensors
    from_scratch: bool = False  # random weights from config.json alone
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    allow_pickle: bool = False  # accept pytorch_model.bin (weights_only)


class DataConfig(Section):
    """JSONL rows. `prompt_key` holds text, or a list of chat messages when `chat_template` is true."""

    train: str
    validation: str | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    chat_template: bool = False
    max_prompt_tokens: PositiveInt = 1024
    shuffle: bool = True


class BatchConfig(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt = 1
    samples_per_minibatch: PositiveInt | None = None  # all samples of the step when null
    epochs_per_step: PositiveInt = 1


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_new_tokens: PositiveInt = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class RolloutConfig(Section):
    engine: Literal["sglang", "transformers"] = "sglang"
    urls: tuple[str, ...] = ()  # running engines; mrl starts its own when empty
    servers: PositiveInt = 1  # engines that mrl starts
    tensor: PositiveInt = 1  # tensor parallelism of each
    sampling: SamplingConfig = SamplingConfig()
    concurrent_requests: PositiveInt = 256  # in flight at once, over all engines
    deterministic: bool = True  # same (seed, step, sample) -> same tokens, whatever else is in the batch
    max_context_tokens: PositiveInt | None = None  # from the model's config when null
    max_running_requests: PositiveInt | None = None  # the engine's own batch limit; by the machine when null
    memory_fraction: Fraction = 0.7  # of GPU memory, for the engine's weights and KV cache
    startup_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 600.0
    max_restarts: NonNegativeInt = 3  # of mrl's own engines in a run, when one dies or lets a request time out
    server_args: tuple[str, ...] = ()  # passed through to the engine's command line


class SyncConfig(Section):
    transport: Literal["auto", "shared_memory", "http", "distributed", "disk", "cuda_ipc"] = "auto"
    bucket_mib: PositiveInt = 512
    verify: Literal["off", "checksum"] = "off"
    timeout_s: PositiveFloat = 300.0


class RewardConfig(Section):
    """`function`: a built-in name (exact_match, sorted_digits, arithmetic, math) or `path/to/file.py:name`."""

    function: str
    workers: PositiveInt = 2
    timeout_s: PositiveFloat = 30.0
    on_error: Literal["stop", "zero"] = "stop"  # a time-out or exception: end the run, or score 0 and count it


class KLConfig(Section):
    use_in_reward: bool = False
    use_in_loss: bool = False
    penalty: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"  # "+": with k2's gradient, in the loss
    coef: NonNegativeFloat = 0.0
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: PositiveFloat | None = None  # adaptive only
    horizon_samples: PositiveInt | None = None  # adaptive only


AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

POLICY_LOSS_OPTIONS: dict[str, tuple[str, ...]] = {  # of PolicyLossConfig's keys, those that a loss mode reads
    "vanilla": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "cispo": ("clip_ratio_low", "clip_ratio_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "dro": ("dro_beta",),
    "gpg": (),
}


class PolicyLossConfig(Section):
    loss_mode: Literal["vanilla", "cispo", "sapo", "dro", "gpg"] = "vanilla"
    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: float = 3.0  # dual clip, > 1
    tau_pos: PositiveFloat = 1.0  # sapo, where the advantage is positive
    tau_neg: PositiveFloat = 1.05
    dro_beta: PositiveFloat = 0.1
    loss_agg_mode: AggMode | None = None  # null: token-mean; sapo always takes seq-mean-token-mean
    loss_scale_factor: PositiveFloat | None = None  # seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    entropy_coef: NonNegativeFloat = 0.0

    @property
    def aggregation(self) -> AggMode:
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.loss_mode == "sapo" else "token-mean")

    @property
    def options(self) -> dict[str, float]:
        return self.model_dump(include=set(POLICY_LOSS_OPTIONS[self.loss_mode]))


class ValueLossConfig(Section):
    cliprange_value: PositiveFloat = 0.5
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"


class AlgorithmConfig(Section):
    adv_estimator: Literal[
        "gae", "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ]
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    norm_adv_by_std_in_grpo: bool = True
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    value_loss: ValueLossConfig = ValueLossConfig()


class ValidationConfig(Section):
    every_steps: PositiveInt = 10
    prompts: PositiveInt = 128
    temperature: NonNegativeFloat = 0.0
    at_start: bool = True


class CheckpointConfig(Section):
    every_steps: PositiveInt | None = None  # null: none
    keep_last: PositiveInt = 2
    keep_every_steps: PositiveInt | None = None  # those of steps n, 2n, ... stay for good, besides the last ones
    asynchronous: bool = True  # written while training goes on, from a copy in host memory; false: waited for, no copy
    on_error: Literal["stop", "warn"] = "stop"  # when one cannot be written (disk full): end the run, or go on without
    writers: Literal["every_rank", "one_node", "one_rank"] = "every_rank"  # who writes at once; the others take turns
    timeout_s: PositiveFloat = 1800.0  # to write one; the next one waits as long
    weights_every_steps: PositiveInt | None = None  # the actor alone, for an engine: RUN_DIR/hf_step_N, never removed
    export_hf: bool = False  # write RUN_DIR/hf (a complete Hugging Face directory) at the end
    accept_changes: tuple[str, ...] = ()  # keys that may differ from those a checkpoint was made with (resume)


class RunConfig(Section):
    name: str
    root: str = "runs"  # the run directory is ROOT/NAME
    seed: NonNegativeInt = 1
    steps: PositiveInt = 100
    nproc: PositiveInt | None = None  # processes on this machine; the smallest world of the layout when null
    tensorboard: bool = True
    timeout_s: PositiveFloat = 600.0  # of every collective
    launcher: Literal["mrl", "torchrun", "ft"] = "mrl"  # who starts this machine's processes; ft restarts failed ones
    max_restarts: NonNegativeInt = 3  # of all ranks, each after a failure; launcher ft only
    max_nonfinite_steps: PositiveInt = 3  # steps in a row with an update skipped for a NaN or infinity: the run stops


class SectionTimeouts(Section):
    """Seconds a rank may stay in one part of the run; after them it counts as hung, and all ranks are restarted."""

    setup: PositiveFloat = 1800.0
    rollout: PositiveFloat = 3600.0  # rewards included
    reward: PositiveFloat = 1200.0  # what is still to be scored when sampling has ended
    update: PositiveFloat = 1800.0
    sync: PositiveFloat = 900.0
    checkpoint: PositiveFloat = 1800.0
    out_of_section: PositiveFloat = 900.0


class ResilienceConfig(Section):
    timeouts_s: SectionTimeouts = SectionTimeouts()  # launcher ft only
    save_deadline_s: PositiveFloat = 60.0  # to end the step and save, after SIGTERM or SIGUSR1
    straggler_every_steps: PositiveInt = 10  # ranks compare the time that they needed
    straggler_ratio: PositiveFloat = 2.0  # a rank that needs this many times its peers' median is named


class RLConfig(Section):
    """`trainer: rl`: PPO, GRPO and their kin."""

    trainer: Literal["rl"]
    run: RunConfig
    model: ModelConfig
    actor: TrainConfig = TrainConfig()
    critic: CriticConfig | None = None
    ref: RefConfig = RefConfig()
    data: DataConfig
    batch: BatchConfig
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    reward: RewardConfig
    algorithm: AlgorithmConfig
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()


class SFTBatchConfig(Section):
    samples_per_step: PositiveInt


class SFTConfig(Section):
    """`trainer: sft`: supervised fine-tuning on prompt + answer; the loss is the mean over answer tokens."""

    trainer: Literal["sft"]
    run: RunConfig
    model: ModelConfig
    actor: TrainConfig = TrainConfig()
    data: DataConfig
    batch: SFTBatchConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()


Config = RLConfig | SFTConfig
