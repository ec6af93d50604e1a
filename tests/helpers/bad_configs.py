"""Valid configurations, and variants with one mistake each with the expected error."""

from __future__ import annotations

from dataclasses import dataclass

DENSE = {  # the config.json of the model that the configurations name
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}

PPO = """\
trainer: rl
run:
  name: test
  steps: 20
  nproc: 4
model:
  path: dense
actor:
  parallel:
    tensor: 2
    pipeline: 2
  optimizer:
    lr: 1e-6
critic:
  warmup_steps: 2
data:
  train: train.jsonl
  max_prompt_tokens: 8
batch:
  prompts_per_step: 16
  samples_per_minibatch: 8
rollout:
  sampling:
    max_new_tokens: 8
reward:
  function: exact_match
algorithm:
  adv_estimator: gae
"""

SFT = """\
trainer: sft
run:
  name: warm
model:
  path: dense
  from_scratch: true
data:
  train: train.jsonl
  max_prompt_tokens: 16
batch:
  samples_per_step: 8
"""


@dataclass
class Bad:
    """A configuration with `old` replaced by `new`. The error names the line of `at` (default: `new`'s last line)."""

    id: str
    old: str
    new: str
    key: str
    says: tuple[str, ...]
    at: str = ""
    base: str = PPO


KL_ON = "  adv_estimator: gae\n  kl:\n    use_in_reward: true\n    coef: 0.1\n"
GAE, NPROC, LR, TENSOR = "  adv_estimator: gae\n", "  nproc: 4\n", "    lr: 1e-6\n", "    tensor: 2\n"
EXPERT_MODEL = "actor:\n  parallel:\n    tensor: 2\n    pipeline: 2\n"

BAD = [
    Bad(
        "unknown key", "prompts_per_step: 16", "prompt_per_step: 16", "batch.prompts_per_step", ("required",), "batch:"
    ),
    Bad(
        "nearest key",
        LR,
        "    lr: 1e-6\n    warm_up_steps: 3\n",
        "actor.optimizer.warm_up_steps",
        ("unknown key", "warmup_steps?"),
    ),
    Bad(
        "misplaced key",
        "\nbatch:\n",
        "\nbatch:\n  clip_grad: 2.0\n",
        "batch.clip_grad",
        ("unknown key", "actor.optimizer.clip_grad"),
    ),
    Bad(
        "unknown section",
        "reward:",
        "checkpoints: {}\nreward:",
        "checkpoints",
        ("did you mean checkpoint?",),
        "checkpoints: {}",
    ),
    Bad(
        "a home of nobody",
        "  steps: 20",
        "  steps: 20\n  root: ~no_such_user/runs",
        "run.root",
        ("is not a home", "./~no"),
    ),
    Bad("duplicate", LR, "    lr: 1e-6\n    lr: 1e-5\n", "actor.optimizer.lr", ("twice", "c.yaml:13"), "    lr: 1e-5"),
    Bad("word for a number", LR, "    lr: fast\n", "actor.optimizer.lr", ("must be a number", "'fast' (a string)")),
    Bad("fraction for a count", "  steps: 20", "  steps: 2.5", "run.steps", ("must be an integer", "2.5")),
    Bad(
        "yes for true",
        "  path: dense\n",
        "  path: dense\n  from_scratch: yes\n",
        "model.from_scratch",
        ("true or false", "'yes'"),
    ),
    Bad(
        "scalar for a section",
        "critic:\n  warmup_steps: 2",
        "critic: 2",
        "critic",
        ("must be a section", "2 (a number)"),
    ),
    Bad(
        "list of the wrong type",
        "    max_new_tokens: 8",
        "    max_new_tokens: 8\n    stop: [a, 1]",
        "rollout.sampling.stop",
        ("every item must be a string",),
    ),
    Bad(
        "scalar for a list",
        "    max_new_tokens: 8",
        "    max_new_tokens: 8\n    stop: a",
        "rollout.sampling.stop",
        ("must be a list",),
    ),
    Bad("out of range", "    tensor: 2", "    tensor: 0", "actor.parallel.tensor", ("must be greater than 0", "0")),
    Bad(
        "unknown choice",
        GAE,
        "  adv_estimator: gea\n",
        "algorithm.adv_estimator",
        ("one of gae, grpo", "did you mean gae?"),
    ),
    Bad(
        "algorithm of several keys",
        GAE,
        "  adv_estimator: ppo\n",
        "algorithm.adv_estimator",
        ("ppo is algorithm: {adv_estimator: gae}",),
    ),
    Bad("unknown trainer", "trainer: rl", "trainer: lm", "trainer", ("one of rl, sft", "got 'lm' (a string)")),
    Bad(
        "trainer of an algorithm",
        "trainer: rl",
        "trainer: GRPO",
        "trainer",
        ("rl with algorithm: {adv_estimator: grpo}",),
    ),
    Bad("no trainer", "trainer: rl\n", "", "trainer", ("required key is missing",), "run:"),
    Bad("not YAML", "  path: dense", "  path: [dense", "", ("not valid YAML",), "actor:"),
    Bad(
        "tensor and heads",
        TENSOR,
        "    tensor: 4\n",
        "actor.parallel.tensor",
        ("4 does not divide", "2 key-value heads: use 1 or 2", "model.path (c.yaml:7)"),
        base=PPO.replace("nproc: 4", "nproc: 8"),
    ),
    Bad(
        "too many stages",
        "    pipeline: 2",
        "    pipeline: 16",
        "actor.parallel.pipeline",
        ("16 stages for 8 layers", "use 1, 2, 4 or 8"),
        base=PPO.replace("nproc: 4", "nproc: 32")
        .replace("minibatch: 8", "minibatch: 32")
        .replace("prompts_per_step: 16", "prompts_per_step: 32"),
    ),
    Bad(
        "odd stages",
        "    pipeline: 2",
        "    pipeline: 3",
        "actor.parallel.pipeline",
        ("8 layers do not divide over 3 stages: use 1, 2, 4 or 8", "first_stage_layers"),
        base=PPO.replace("nproc: 4", "nproc: 6"),
    ),
    Bad("two machines on one", NPROC, "  nproc: 4\n  nodes: 2\n", "run.nodes", ("2 machines", "--nodes 2")),
    Bad(
        "virtual without pipeline",
        "    pipeline: 2",
        "    virtual_pipeline: 2",
        "actor.parallel.virtual_pipeline",
        ("no effect", "actor.parallel.pipeline (default)"),
    ),
    Bad(
        "virtual chunks",
        "    pipeline: 2",
        "    pipeline: 2\n    virtual_pipeline: 3",
        "actor.parallel.virtual_pipeline",
        ("3 chunks per stage", "each stage (4): use 2 or 4"),
    ),
    Bad(
        "first stage takes all",
        "    pipeline: 2",
        "    pipeline: 2\n    first_stage_layers: 8",
        "actor.parallel.first_stage_layers",
        ("leave 0 layers for 1 other stages", "first_stage_layers 1, 2, 3, 4, 5, 6 or 7"),
    ),
    Bad(
        "middle stages",
        "    pipeline: 2",
        "    pipeline: 4\n    last_stage_layers: 1",
        "actor.parallel.last_stage_layers",
        ("leave 7 layers for 3", "last_stage_layers 2 or 5"),
        base=PPO.replace("nproc: 4", "nproc: 8"),
    ),
    Bad(
        "experts of a dense model",
        "    pipeline: 2",
        "    pipeline: 2\n    expert: 2",
        "actor.parallel.expert",
        ("dense", "model.path (c.yaml:7)"),
    ),
    Bad(
        "world",
        NPROC,
        "  nproc: 6\n",
        "actor.parallel.tensor",
        ("tensor 2 x pipeline 2 x context 1 = 4", "world", "6 ranks: use tensor 1", "run.nproc (c.yaml:5)"),
        "    tensor: 2",
    ),
    Bad(
        "world of the critic",
        "critic:\n",
        "critic:\n  parallel: {context: 3}\n",
        "critic.parallel.context",
        ("= 3 ranks do not divide", "4 ranks: use context 1, 2 or 4"),
    ),
    Bad(
        "engine's tensor and heads",
        "rollout:\n",
        "rollout:\n  tensor: 3\n",
        "rollout.tensor",
        ("3 does not divide", "2 key-value heads: use 1, 2 or 4"),
    ),
    Bad(
        "a model's own code in the engine",
        "rollout:\n",
        "rollout:\n  server_args: [--log-requests, --trust-remote]\n",
        "rollout.server_args",
        ("--trust-remote-code runs code",),
    ),
    Bad(
        "mini-batches",
        "  samples_per_minibatch: 8",
        "  samples_per_minibatch: 5",
        "batch.samples_per_minibatch",
        ("5 does not divide", "16 prompts x 1 samples = 16", "batch.prompts_per_step (c.yaml:20)"),
    ),
    Bad(
        "fewer samples than replicas",
        "  samples_per_minibatch: 8",
        "  samples_per_minibatch: 1",
        "batch.samples_per_minibatch",
        ("1 samples per update", "4 data-parallel replicas", "critic.parallel"),
        base=PPO,
    ),
    Bad(
        "gae without critic",
        "critic:\n  warmup_steps: 2\n",
        "",
        "algorithm.adv_estimator",
        ("gae needs a critic", "critic (default)"),
        "  adv_estimator: gae",
    ),
    Bad(
        "grpo with one sample",
        "critic:\n  warmup_steps: 2\n",
        "",
        "batch.samples_per_prompt",
        ("at least 2", "algorithm.adv_estimator"),
        "batch:",
        base=PPO.replace("gae", "grpo"),
    ),
    Bad(
        "grpo with critic",
        GAE,
        "  adv_estimator: grpo\n",
        "critic",
        ("no effect", "grpo", "algorithm.adv_estimator"),
        "critic:",
        base=PPO.replace("  prompts_per_step: 16", "  prompts_per_step: 8\n  samples_per_prompt: 2"),
    ),
    Bad(
        "lam with grpo",
        GAE,
        "  adv_estimator: grpo\n  lam: 0.95\n",
        "algorithm.lam",
        ("no effect", "grpo"),
        base=PPO.replace("critic:\n  warmup_steps: 2\n", "").replace(
            "  prompts_per_step: 16", "  prompts_per_step: 8\n  samples_per_prompt: 2"
        ),
    ),
    Bad(
        "grpo's setting with gae",
        GAE,
        GAE + "  norm_adv_by_std_in_grpo: false\n",
        "algorithm.norm_adv_by_std_in_grpo",
        ("no effect", "gae"),
    ),
    Bad(
        "gamma with a group estimator",
        GAE,
        "  adv_estimator: rloo\n  gamma: 0.9\n",
        "algorithm.gamma",
        ("no effect", "rloo", "algorithm.adv_estimator"),
        base=PPO.replace("critic:\n  warmup_steps: 2\n", "").replace(
            "  prompts_per_step: 16", "  prompts_per_step: 8\n  samples_per_prompt: 2"
        ),
    ),
    Bad(
        "another loss's setting",
        GAE,
        GAE + "  policy_loss: {loss_mode: cispo, tau_neg: 2.0}\n",
        "algorithm.policy_loss.tau_neg",
        ("no effect", "cispo", "algorithm.policy_loss.loss_mode"),
    ),
    Bad(
        "dual clip of a loss without one",
        GAE,
        GAE + "  policy_loss: {loss_mode: gpg, clip_ratio_c: 5.0}\n",
        "algorithm.policy_loss.clip_ratio_c",
        ("no effect", "gpg"),
    ),
    Bad(
        "sapo with another aggregate",
        GAE,
        GAE + "  policy_loss: {loss_mode: sapo, loss_agg_mode: token-mean}\n",
        "algorithm.policy_loss.loss_agg_mode",
        ("token-mean would change the loss", "algorithm.policy_loss.loss_mode"),
    ),
    Bad(
        "token-level choice of a loss without one",
        GAE,
        GAE + "  policy_loss: {loss_mode: kl_cov, clip_cov_ub: 9.0}\n",
        "algorithm.policy_loss.clip_cov_ub",
        ("no effect", "kl_cov", "algorithm.policy_loss.loss_mode"),
    ),
    Bad(
        "no covariance between the bounds",
        GAE,
        GAE + "  policy_loss: {loss_mode: clip_cov, clip_cov_lb: 6.0}\n",
        "algorithm.policy_loss.clip_cov_lb",
        ("above 6.0 and below 5.0", "algorithm.policy_loss.clip_cov_ub"),
    ),
    Bad(
        "geo_mean by tokens",
        GAE,
        GAE + "  policy_loss: {loss_mode: geo_mean, loss_agg_mode: token-mean}\n",
        "algorithm.policy_loss.loss_agg_mode",
        ("token-mean would change the loss", "algorithm.policy_loss.loss_mode"),
    ),
    Bad(
        "kl_cov at ratio 1",
        GAE,
        GAE + "  policy_loss: {loss_mode: kl_cov}\n",
        "algorithm.policy_loss.loss_mode",
        ("no effect", "one update", "batch.samples_per_minibatch"),
        base=PPO.replace("samples_per_minibatch: 8", "samples_per_minibatch: 16"),
    ),
    Bad(
        "dro at ratio 1",
        GAE,
        GAE + "  policy_loss: {loss_mode: dro}\n",
        "algorithm.policy_loss.loss_mode",
        ("no effect", "one update", "batch.samples_per_minibatch"),
        base=PPO.replace("samples_per_minibatch: 8", "samples_per_minibatch: 16"),
    ),
    Bad(
        "threshold without weights",
        GAE,
        GAE + "  rollout_correction: {rollout_is_threshold: 5.0}\n",
        "algorithm.rollout_correction.rollout_is_threshold",
        ("no effect", "algorithm.rollout_correction.rollout_is"),
    ),
    Bad(
        "weights that the ratio has already",
        GAE,
        GAE + "  old_log_probs: engine\n  rollout_correction: {rollout_is: token}\n",
        "algorithm.rollout_correction.rollout_is",
        ("twice", "algorithm.old_log_probs"),
    ),
    Bad(
        "weights beside a ratio of whole responses",
        GAE,
        GAE + "  policy_loss: {loss_mode: vespo}\n  rollout_correction: {rollout_is: sequence}\n",
        "algorithm.rollout_correction.rollout_is",
        ("old_log_probs: engine", "algorithm.policy_loss.loss_mode"),
    ),
    Bad(
        "kernel of another loss",
        GAE,
        GAE + "  policy_loss: {vespo_k_pos: 1.0}\n",
        "algorithm.policy_loss.vespo_k_pos",
        ("no effect", "vanilla"),
    ),
    Bad(
        "distance that nothing has",
        GAE,
        GAE + "  policy_loss: {loss_mode: dppo_tv, divergence_low: 1.0}\n",
        "algorithm.policy_loss.divergence_low",
        ("never differ by more", "dppo_tv"),
    ),
    Bad(
        "scale of another mean of values",
        GAE,
        GAE + "  value_loss: {loss_scale_factor: 100.0}\n",
        "algorithm.value_loss.loss_scale_factor",
        ("no effect", "token-mean", "algorithm.value_loss.loss_agg_mode (default)"),
    ),
    Bad(
        "correction of a penalty that is a number",
        GAE,
        KL_ON + "    bias_correction: true\n",
        "algorithm.kl.bias_correction",
        ("no effect", "algorithm.kl.use_in_loss (default)"),
    ),
    Bad(
        "two corrections of one gradient",
        GAE,
        GAE + "  kl: {use_in_loss: true, coef: 0.1, penalty: k3+, bias_correction: true}\n",
        "algorithm.kl.bias_correction",
        ("already has an unbiased gradient", "use k3", "algorithm.kl.penalty"),
    ),
    Bad(
        "power of a method that has none",
        GAE,
        GAE + "  pf_ppo: {reweight_method: max_min, weight_pow: 3.0}\n",
        "algorithm.pf_ppo.weight_pow",
        ("no effect", "max_min"),
    ),
    Bad(
        "mean of what is not whitened",
        GAE,
        GAE + "  whiten_advantages: false\n  whiten_shift_mean: false\n",
        "algorithm.whiten_shift_mean",
        ("no effect", "algorithm.whiten_advantages"),
    ),
    Bad(
        "weights cut below 1",
        GAE,
        GAE + "  rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5}\n",
        "algorithm.rollout_correction.rollout_is_threshold",
        ("'0.5' excludes the weight 1",),
    ),
    Bad(
        "bounds that are none",
        GAE,
        GAE + "  rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5-2.0}\n",
        "algorithm.rollout_correction.rollout_is_threshold",
        ("'0.5-2.0' is neither a number nor a pair",),
    ),
    Bad(
        "rejection without a bound",
        GAE,
        GAE + "  rollout_correction: {rollout_rs: token_k1}\n",
        "algorithm.rollout_correction.rollout_rs_threshold",
        ("required", "algorithm.rollout_correction.rollout_rs"),
    ),
    Bad(
        "a bound without rejection",
        GAE,
        GAE + "  rollout_correction: {rollout_rs_threshold: 2.0}\n",
        "algorithm.rollout_correction.rollout_rs_threshold",
        ("no effect", "algorithm.rollout_correction.rollout_rs"),
    ),
    Bad(
        "a lower bound of a criterion without one",
        GAE,
        GAE + '  rollout_correction: {rollout_rs: "token_k1, seq_mean_k3", rollout_rs_threshold: 0.5_2.0}\n',
        "algorithm.rollout_correction.rollout_rs_threshold",
        ("'0.5_2.0' for seq_mean_k3", "one positive upper bound", "algorithm.rollout_correction.rollout_rs"),
    ),
    Bad(
        "unknown rejection",
        GAE,
        GAE + '  rollout_correction: {rollout_rs: "token_k1, seq_max_k1", rollout_rs_threshold: 2.0}\n',
        "algorithm.rollout_correction.rollout_rs",
        ("seq_max_k2",),
    ),
    Bad(
        "ratio threshold at ratio 1",
        GAE,
        GAE + "  ratio_threshold: 10.0\n",
        "algorithm.ratio_threshold",
        ("no effect", "one update", "batch.samples_per_minibatch"),
        base=PPO.replace("samples_per_minibatch: 8", "samples_per_minibatch: 16"),
    ),
    Bad("ratio threshold below 1", GAE, GAE + "  ratio_threshold: 1.0\n", "algorithm.ratio_threshold", ("above 1",)),
    Bad(
        "nothing to stop early",
        GAE,
        GAE + "  target_kl: 0.1\n",
        "algorithm.target_kl",
        ("no effect", "one epoch", "batch.epochs_per_step"),
    ),
    Bad(
        "scale factor of another aggregate",
        GAE,
        GAE + "  policy_loss: {loss_scale_factor: 100.0}\n",
        "algorithm.policy_loss.loss_scale_factor",
        ("no effect", "token-mean"),
    ),
    Bad(
        "straight-through penalty in the reward",
        "    coef: 0.1",
        "    coef: 0.1\n    penalty: k3+",
        "algorithm.kl.penalty",
        ("differs from k3 only in its gradient", "algorithm.kl.use_in_reward"),
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad(
        "kl in both",
        "    coef: 0.1",
        "    coef: 0.1\n    use_in_loss: true",
        "algorithm.kl.use_in_reward",
        ("twice", "algorithm.kl.use_in_loss"),
        "use_in_reward: true",
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad(
        "kl with coefficient 0",
        "    coef: 0.1",
        "    coef: 0.0",
        "algorithm.kl.coef",
        ("0 disables", "algorithm.kl.use_in_reward"),
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad("kl coefficient unused", GAE, GAE + "  kl: {coef: 0.1}\n", "algorithm.kl.coef", ("no effect", "both false")),
    Bad(
        "adaptive without target",
        "    coef: 0.1",
        "    coef: 0.1\n    controller: adaptive\n    horizon_samples: 100",
        "algorithm.kl.target",
        ("required by the adaptive",),
        "  kl:",
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad(
        "fixed with target",
        "    coef: 0.1",
        "    coef: 0.1\n    target: 0.1",
        "algorithm.kl.target",
        ("no effect", "fixed"),
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad(
        "adaptive in the loss",
        "    use_in_reward: true",
        "    use_in_loss: true\n    controller: adaptive\n    target: 1.0\n    horizon_samples: 9",
        "algorithm.kl.controller",
        ("set controller: fixed",),
        "controller: adaptive",
        base=PPO.replace(GAE, KL_ON),
    ),
    Bad(
        "reference without kl",
        "data:",
        "ref:\n  path: dense\ndata:",
        "ref.path",
        ("no KL term",),
        "  path: dense\ndata",
    ),
    Bad(
        "decay without steps",
        LR,
        "    lr: 1e-6\n    decay: linear\n",
        "actor.optimizer.decay_steps",
        ("required by linear",),
        "  optimizer:",
    ),
    Bad(
        "floor without decay",
        LR,
        "    lr: 1e-6\n    min_lr: 1e-7\n",
        "actor.optimizer.min_lr",
        ("no effect", "constant"),
    ),
    Bad(
        "floor above the rate",
        LR,
        "    lr: 1e-6\n    decay: linear\n    decay_steps: 9\n    min_lr: 1e-5\n",
        "actor.optimizer.min_lr",
        ("1e-05 is above", "actor.optimizer.lr (c.yaml:13)"),
    ),
    Bad(
        "updates that would learn nothing",
        LR,
        "    lr: 1e-6\n    decay: cosine\n    decay_steps: 1\n",
        "actor.optimizer.decay_steps",
        ("the others would have a learning rate of 0", "min_lr"),
    ),
    Bad(
        "warm-up longer than decay",
        LR,
        "    lr: 1e-6\n    decay: cosine\n    decay_steps: 5\n    warmup_steps: 5\n",
        "actor.optimizer.warmup_steps",
        ("leave none",),
    ),
    Bad(
        "an end of the entropy bonus without steps",
        GAE,
        GAE + "  policy_loss: {entropy_coef: 0.1, entropy_coef_end: 0}\n",
        "algorithm.policy_loss.entropy_coef_steps",
        ("required", "entropy_coef_end"),
    ),
    Bad(
        "steps of an entropy bonus that stays",
        GAE,
        GAE + "  policy_loss: {entropy_coef: 0.1, entropy_coef_steps: 9}\n",
        "algorithm.policy_loss.entropy_coef_steps",
        ("no effect", "constant"),
    ),
    Bad(
        "an entropy bonus that falls to itself",
        GAE,
        GAE + "  policy_loss: {entropy_coef: 0.1, entropy_coef_end: 0.1, entropy_coef_steps: 9}\n",
        "algorithm.policy_loss.entropy_coef_end",
        ("no effect", "0.1 from the start"),
    ),
    Bad(
        "dual clip",
        GAE,
        GAE + "  policy_loss: {clip_ratio_c: 1.0}\n",
        "algorithm.policy_loss.clip_ratio_c",
        ("greater than 1",),
    ),
    Bad(
        "frozen critic warms up",
        "  warmup_steps: 2",
        "  warmup_steps: 2\n  frozen: true",
        "critic.warmup_steps",
        ("no effect", "critic.frozen"),
        "warmup_steps: 2",
    ),
    Bad(
        "frozen critic with an optimizer",
        "  warmup_steps: 2",
        "  frozen: true\n  optimizer: {lr: 1e-3}",
        "critic.optimizer",
        ("no effect", "critic.frozen"),
    ),
    Bad(
        "frozen critic without its optimizer",
        "  warmup_steps: 2",
        "  frozen: true\n  offload: optimizer",
        "critic.offload",
        ("no effect", "none, or all", "critic.frozen"),
        "offload: optimizer",
    ),
    Bad(
        "offload in sft",
        "data:",
        "actor:\n  offload: optimizer\ndata:",
        "actor.offload",
        ("no effect", "trainer"),
        "offload: optimizer",
        base=SFT,
    ),
    Bad(
        "value loss of a frozen critic",
        GAE,
        GAE + "  value_loss: {cliprange_value: 0.2}\n",
        "algorithm.value_loss",
        ("no effect", "critic.frozen"),
        base=PPO.replace("  warmup_steps: 2", "  frozen: true"),
    ),
    Bad(
        "value loss without values",
        GAE,
        "  adv_estimator: reinforce_plus_plus\n  value_loss: {cliprange_value: 0.2}\n",
        "algorithm.value_loss",
        ("no effect", "algorithm.adv_estimator"),
        base=PPO.replace("critic:\n  warmup_steps: 2\n", ""),
    ),
    Bad(
        "critic-only run",
        "  warmup_steps: 2",
        "  warmup_steps: 20",
        "critic.warmup_steps",
        ("never be trained", "run.steps (c.yaml:4)"),
    ),
    Bad("no model", "  path: dense", "  path: nowhere", "model.path", ("nowhere/config.json does not exist",)),
    Bad(
        "name on the hub",
        "  path: dense",
        "  path: Qwen/Qwen3-8B",
        "model.path",
        ("run hf download Qwen/Qwen3-8B --local-dir DIR",),
    ),
    Bad(
        "unsupported model",
        "  path: dense",
        "  path: gpt",
        "model.path",
        ("GPT2LMHead is not supported", "Qwen2ForCausalLM"),
    ),
    Bad(
        "pickles of random weights",
        "  path: dense\n",
        "  path: dense\n  from_scratch: true\n  allow_pickle: true\n",
        "model.allow_pickle",
        ("no effect", "model.from_scratch"),
    ),
    Bad("pickled model", "  path: dense", "  path: pickled", "model.path", ("pickled", "model.allow_pickle")),
    Bad(
        "critic with another vocabulary",
        "critic:\n",
        "critic:\n  path: other\n",
        "critic.path",
        ("17 tokens", "16", "model.path"),
    ),
    Bad(
        "context",
        "    max_new_tokens: 8",
        "    max_new_tokens: 60",
        "data.max_prompt_tokens",
        ("8 prompt tokens + 60 new tokens", "context of 64", "rollout.sampling.max_new_tokens (c.yaml:24)"),
        "  max_prompt_tokens",
    ),
    Bad(
        "longer than the model",
        "rollout:",
        "rollout:\n  max_context_tokens: 128",
        "rollout.max_context_tokens",
        ("64 positions",),
    ),
    Bad(
        "servers at given addresses",
        "rollout:",
        "rollout:\n  urls: [http://a:1]\n  servers: 2",
        "rollout.servers",
        ("no effect", "rollout.urls"),
    ),
    Bad(
        "threads of a tensor-parallel engine",
        "rollout:",
        "rollout:\n  tensor: 2\n  threads: 2",
        "rollout.threads",
        ("no effect: tensor-parallel engines on CPUs use one thread", "rollout.tensor"),
    ),
    Bad(
        "fewer GPUs than engines",
        "rollout:",
        "rollout:\n  servers: 2\n  gpus: [3]",
        "rollout.gpus",
        ("names 1 GPU, but 2 servers x tensor 1 = 2 GPUs", "rollout.servers"),
    ),
    Bad(
        "one GPU for two engines",
        "rollout:",
        "rollout:\n  servers: 2\n  gpus: [3, 3]",
        "rollout.gpus",
        ("names 3 twice", "memory_fraction of the free memory"),
    ),
    Bad(
        "a GPU before the first",
        "rollout:",
        "rollout:\n  gpus: [-1]",
        "rollout.gpus",
        ("every item must be greater than or equal to 0, got -1",),
    ),
    Bad(
        "GPUs of given engines",
        "rollout:",
        "rollout:\n  urls: [http://a:1]\n  gpus: [1]",
        "rollout.gpus",
        ("no effect", "rollout.urls"),
    ),
    Bad(
        "restarts of given engines",
        "rollout:",
        "rollout:\n  urls: [http://a:1]\n  max_restarts: 1",
        "rollout.max_restarts",
        ("no effect", "rollout.urls"),
    ),
    Bad(
        "a key for engines of our own",
        "rollout:",
        "rollout:\n  api_key_file: key",
        "rollout.api_key_file",
        ("no effect", "rollout.urls"),
    ),
    Bad(
        "a key that is not there",
        "rollout:",
        "rollout:\n  urls: [http://a:1]\n  api_key_file: key",
        "rollout.api_key_file",
        ("cannot read key: No such file",),
    ),
    Bad(
        "a key for all to see",
        "rollout:",
        "rollout:\n  urls: [http://a:1]\n  api_key_file: plain.txt",
        "rollout.api_key_file",
        ("chmod 600",),
    ),
    Bad(
        "a password in an address",
        "rollout:",
        "rollout:\n  urls: ['http://me:sesame@a:1']",
        "rollout.urls",
        ("the URL of a contains a password", "use api_key_file"),
    ),
    Bad(
        "a key on the command line",
        "rollout:",
        "rollout:\n  server_args: [--api-key=sesame]",
        "rollout.server_args",
        ("mrl sets --api-key itself",),
    ),
    Bad(
        "a warning that never comes",
        "rollout:",
        "rollout:\n  mismatch: {warn: 2.0}",
        "rollout.mismatch.warn",
        ("2 is above 1", "rollout.mismatch.stop"),
    ),
    Bad(
        "an engine's address without an end",
        "rollout:",
        "rollout:\n  urls: ['http://[a:1']",
        "rollout.urls",
        ("'http://[a:1' is not an address such as http://host:8000",),
    ),
    Bad(
        "an engine's port that there is not",
        "rollout:",
        "rollout:\n  urls: [http://a:99999]",
        "rollout.urls",
        ("'http://a:99999' is not an address",),
    ),
    Bad(
        "one engine twice",
        "rollout:",
        "rollout:\n  urls: [http://a:1, http://a:1]",
        "rollout.urls",
        ("names an engine twice",),
    ),
    Bad(
        "SGLang's settings for another engine",
        "rollout:",
        "rollout:\n  engine: transformers\n  tensor: 2",
        "rollout.tensor",
        ("no effect", "rollout.engine"),
    ),
    Bad(
        "buckets of a disk",
        "reward:",
        "sync: {transport: disk, bucket_mib: 64}\nreward:",
        "sync.bucket_mib",
        ("no effect", "sync.transport"),
        "sync:",
    ),
    Bad(
        "deltas through memory",
        "reward:",
        "sync: {transport: shared_memory, delta: {}}\nreward:",
        "sync.delta",
        ("shared_memory does not send deltas", "http or distributed"),
        "sync:",
    ),
    Bad(
        "deltas by a transport that mrl chooses",
        "reward:",
        "sync: {delta: {full_every: 9}}\nreward:",
        "sync.delta",
        ("auto does not send deltas", "sync.transport"),
        "sync:",
    ),
    Bad(
        "deltas from weights that are released",
        "rollout:",
        "sync: {transport: http, delta: {}}\nrollout:\n  release: all",
        "sync.delta",
        ("rollout.release", "loses the weights"),
        "sync:",
    ),
    Bad("not an address", "rollout:", "rollout:\n  urls: [a:1]", "rollout.urls", ("'a:1' is not an address",)),
    Bad("engine and heads", "rollout:", "rollout:\n  tensor: 3", "rollout.tensor", ("3 does not divide", "4 heads")),
    Bad(
        "top_k", "    max_new_tokens: 8", "    max_new_tokens: 8\n    top_k: 0", "rollout.sampling.top_k", ("-1 (off)",)
    ),
    Bad(
        "cuda_ipc without GPU",
        "reward:",
        "sync: {transport: cuda_ipc}\nreward:",
        "sync.transport",
        ("needs GPUs",),
        "sync:",
    ),
    Bad(
        "a process group with the transformers engine",
        "rollout:",
        "sync: {transport: distributed}\nrollout:\n  engine: transformers",
        "sync.transport",
        ("transformers engine does not support distributed", "shared_memory, http, disk or auto"),
        "sync:",
    ),
    Bad(
        "shared memory far away",
        "rollout:",
        "sync: {transport: shared_memory}\nrollout:\n  urls: [http://far:1]",
        "sync.transport",
        ("cannot reach http://far:1", "rollout.urls"),
        "sync:",
    ),
    Bad(
        "a folder of this machine for engines far away",
        "rollout:",
        "sync: {transport: disk}\nrollout:\n  urls: [http://far:1]",
        "sync.transport",
        ("disk cannot reach http://far:1", "use distributed, http or auto"),
        "sync:",
    ),
    Bad(
        "validation without data",
        "reward:",
        "validation: {every_steps: 5}\nreward:",
        "validation",
        ("no effect", "data.validation"),
        "validation:",
    ),
    Bad(
        "several samples of a greedy validation",
        "\nreward:",
        "\nvalidation: {samples_per_prompt: 4}\nreward:",
        "validation.samples_per_prompt",
        ("has no effect: temperature 0 is greedy", "validation.temperature (default)"),
        "validation: {",
        base=PPO.replace("  train: train.jsonl", "  train: train.jsonl\n  validation: train.jsonl"),
    ),
    Bad(
        "no such reward",
        "  function: exact_match",
        "  function: exactmatch",
        "reward.function",
        ("did you mean exact_match?",),
    ),
    Bad(
        "no such file of rewards",
        "  function: exact_match",
        "  function: his.py:score",
        "reward.function",
        ("cannot read his.py",),
    ),
    Bad(
        "no such function",
        "  function: exact_match",
        "  function: mine.py:sore",
        "reward.function",
        ("does not define 'sore'", "score"),
    ),
    Bad("name is a path", "  name: test", "  name: a/b", "run.name", ("plain directory name",)),
    Bad(
        "kept checkpoints",
        "reward:",
        "checkpoint: {keep_last: 5}\nreward:",
        "checkpoint.keep_last",
        ("no effect", "checkpoint.every_steps"),
        "checkpoint:",
    ),
    Bad(
        "a checkpoint that waits for nothing",
        "reward:",
        "checkpoint: {asynchronous: false}\nreward:",
        "checkpoint.asynchronous",
        ("no effect", "checkpoint.every_steps"),
        "checkpoint:",
    ),
    Bad(
        "lasting checkpoints that are never written",
        "reward:",
        "checkpoint: {every_steps: 4, keep_every_steps: 6}\nreward:",
        "checkpoint.keep_every_steps",
        ("6 is not a multiple of 4", "checkpoint.every_steps"),
        "checkpoint:",
    ),
    Bad(
        "accepted change of an unknown key",
        "reward:",
        "checkpoint: {accept_changes: [actor.lr]}\nreward:",
        "checkpoint.accept_changes",
        ("'actor.lr' is not a key",),
        "checkpoint:",
    ),
    Bad(
        "restarts without ft",
        NPROC,
        "  nproc: 4\n  max_restarts: 5\n",
        "run.max_restarts",
        ("no effect", "launcher mrl neither monitors nor restarts ranks", "run.launcher"),
    ),
    Bad(
        "section time-outs without ft",
        "reward:",
        "resilience:\n  timeouts_s: {sync: 60}\nreward:",
        "resilience.timeouts_s",
        ("no effect", "run.launcher"),
        "  timeouts_s:",
    ),
    Bad(
        "ft without checkpoints",
        NPROC,
        "  nproc: 4\n  launcher: ft\n",
        "run.launcher",
        ("none is written", "checkpoint.every_steps (default)"),
    ),
    Bad(
        "a deadline to save without checkpoints",
        "reward:",
        "resilience: {save_deadline_s: 20}\nreward:",
        "resilience.save_deadline_s",
        ("no effect", "checkpoint.every_steps"),
        "resilience:",
    ),
    Bad(
        "every rank is slow",
        "reward:",
        "resilience: {straggler_ratio: 1.0}\nreward:",
        "resilience.straggler_ratio",
        ("greater than 1",),
        "resilience:",
    ),
    Bad(
        "rewards longer than the rollout",
        NPROC,
        NPROC + "  launcher: ft\ncheckpoint: {every_steps: 1}\nresilience:\n  timeouts_s: {reward: 9, rollout: 8}\n",
        "resilience.timeouts_s.reward",
        ("never reached", "resilience.timeouts_s.rollout"),
        "  timeouts_s:",
    ),
    Bad(
        "sft waits for no rollout",
        "  name: warm\n",
        "  name: warm\n  launcher: ft\ncheckpoint: {every_steps: 1}\nresilience:\n  timeouts_s: {rollout: 9}\n",
        "resilience.timeouts_s.rollout",
        ("no effect", "sft does not generate"),
        "  timeouts_s:",
        base=SFT,
    ),
    Bad("sft has no rollout", "batch:", "rollout: {}\nbatch:", "rollout", ("unknown key",), "rollout:", base=SFT),
    Bad(
        "sft replicas",
        "  name: warm",
        "  name: warm\n  nproc: 16",
        "batch.samples_per_step",
        ("16 data-parallel replicas",),
        "  samples_per_step",
        base=SFT,
    ),
    *(
        Bad(
            f"{key} after the last step",
            "reward:",
            f"checkpoint: {{{before}{key}: 40}}\nreward:",
            f"checkpoint.{key}",
            ("no effect: step 40 is after the last step, 20", "run.steps"),
            "checkpoint:",
        )
        for key, before in (("weights_every_steps", ""), ("keep_every_steps", "every_steps: 10, "))
    ),
    Bad(
        "a time to write nothing",
        "reward:",
        "checkpoint: {timeout_s: 60.0}\nreward:",
        "checkpoint.timeout_s",
        ("no effect: neither are checkpoints written", "checkpoint.every_steps (default)"),
        "checkpoint:",
    ),
]
