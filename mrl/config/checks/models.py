"""Checks the models' directories (reads config.json, no weights), optimizers, layers, heads and critic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.config import tokenizer_files
from mrl.config.checks.base import Archs, without_effect
from mrl.config.derived import Machine, asks_for_transformer_engine
from mrl.config.model_dirs import is_converted, read_converted
from mrl.config.problems import Problem, reason
from mrl.config.sections.models import ModelConfig, OptimizerConfig, TrainConfig
from mrl.config.trainers.base import Config, ModelUse
from mrl.config.trainers.rl import RLConfig
from mrl.families import FAMILIES, ModelArch, UnsupportedModel, is_reward_model, load_arch


def read_archs(cfg: Config, problems: list[Problem], shapes_only: bool = False) -> Archs:
    """Returns the shapes of the run's models, and appends what is wrong with their directories to `problems`.

    With `shapes_only`, checks the config.json files only.
    """
    model = cfg.model
    actor = _arch("model.path", model.path, problems)
    if actor is not None and not model.from_scratch and not shapes_only:
        problems.extend(_weights("model.path", model.path, model.allow_pickle))
    if actor is not None and not shapes_only:
        found_in_tokenizer = tokenizer_files.tokenizer_problems(model.path, actor.vocab_size, model.eos_token)
        problems.extend(Problem((key,), message) for key, message in found_in_tokenizer)
    archs: dict[str, ModelArch | None] = {}
    for name, use in cfg.models().items():
        archs[name] = actor if use.path is None else _other(f"{name}.path", use, model, actor, problems, shapes_only)
    return archs


def _other(
    key: str, use: ModelUse, model: ModelConfig, actor: ModelArch | None, problems: list[Problem], shapes_only: bool
) -> ModelArch | None:
    """Returns the shape of a model with its own directory, and appends problems."""
    assert use.path is not None
    arch = _arch(key, use.path, problems)
    if arch is None:
        return None
    if not (shapes_only or use.is_served):
        problems.extend(_weights(key, use.path, model.allow_pickle))
    if use.is_teacher:
        difference = None if shapes_only else tokenizer_files.difference(use.path, model.path)
        problems.extend([Problem((key, "model.path"), difference)] if difference is not None else [])
    elif actor is not None and arch.vocab_size != actor.vocab_size:
        message = f"its vocabulary has {arch.vocab_size} tokens, and the actor's {actor.vocab_size}"
        problems.append(Problem((key, "model.path"), message))
    if use.scores and not is_reward_model(use.path):
        problems.append(Problem((key,), "has no score head: expected a ...ForSequenceClassification"))
    if use.scores and arch.scores_steps:
        message = "is a process reward model, which scores steps: expected a ...ForSequenceClassification"
        problems.append(Problem((key,), message))
    if use.has_head and arch.score_heads > 1:
        problems.append(Problem((key,), f"has {arch.score_heads} score heads, and a critic needs exactly one"))
    return arch


def _arch(key: str, path: str, problems: list[Problem]) -> ModelArch | None:
    try:
        return load_arch(path)
    except UnsupportedModel as error:
        message = str(error)
    except FileNotFoundError as error:
        message = str(error)
    except KeyError as error:
        message = f"{path}/config.json lacks {error}"
    except (OSError, ValueError) as error:
        message = f"cannot read {path}/config.json: {reason(error)}"
    problems.append(Problem((key,), message))
    return None


def _weights(key: str, path: str, allow_pickle: bool) -> Iterator[Problem]:
    if is_converted(path):
        try:
            read_converted(path)
        except ValueError as error:
            yield Problem((key,), str(error))
        return
    if any(Path(path).glob("*.safetensors")):
        return
    if any(Path(path).glob("*.bin")):
        if not allow_pickle:
            message = f"{path} has only pickled weights: set allow_pickle: true to read them"
            yield Problem((key, "model.allow_pickle"), message)
    elif key == "model.path":
        message = f"{path} has no safetensors; set from_scratch: true to start from random weights"
        yield Problem((key, "model.from_scratch"), message)
    else:
        yield Problem((key,), f"{path} has no safetensors")


def check(cfg: Config, archs: Archs, machine: Machine) -> Iterator[Problem]:
    """Checks the model's files, and the optimizers and layers of the models that are trained."""
    yield from _model(cfg)
    for name, use in cfg.models().items():
        if use.train is None:
            continue
        yield from check_optimizer(f"{name}.optimizer", use.train.optimizer, cfg.min_updates(name))
        if use.train.optimizer.muon is not None:
            yield from _muon(cfg, name, use.train)
        if not cfg.offloads_memory():
            because = f"trainer {cfg.trainer} updates the model all the time"
            yield from without_effect(use.train, name, ["offload"], because, "trainer")
    yield from check_layers(cfg, archs, machine)


def _model(cfg: Config) -> Iterator[Problem]:
    model, key = cfg.model, "model.chat_template"
    if model.from_scratch and model.allow_pickle and not any(use.path for use in cfg.models().values()):
        yield Problem(("model.allow_pickle", "model.from_scratch"), "has no effect: from_scratch reads no weights")
    if model.chat_template is None:
        return
    if not Path(model.chat_template).is_file():
        yield Problem((key,), f"{model.chat_template} does not exist: expected a file with a Jinja template")
    if not any(use.cfg.chat_template for use in cfg.data_uses().values()):
        yield Problem((key, "data.chat_template"), "has no effect: data.chat_template is false")


def _muon(cfg: Config, name: str, train: TrainConfig) -> Iterator[Problem]:
    key = f"{name}.optimizer.muon"
    if train.lora is not None:
        message = "does not train adapters: orthogonalizing A and B is not an update of their product: remove muon"
        yield Problem((key, f"{name}.lora"), message)
    if cfg.model.vision.train:
        message = "does not train vision towers: remove muon, or set model.vision.train: false"
        yield Problem((key, "model.vision.train"), message)
    if train.precision.fp8.params:
        message = "has not been tested with weights in fp8: remove muon, or set params: false"
        yield Problem((key, f"{name}.precision.fp8.params"), message)


def check_optimizer(key: str, opt: OptimizerConfig, updates: int | None) -> Iterator[Problem]:
    """Checks the optimizer under `key`.

    Args:
        updates: minimum number of updates of the run; None: depends on the data
    """
    decay = f"{key}.decay"
    if opt.decay == "constant":
        yield from without_effect(opt, key, ["decay_steps", "min_lr"], "the learning rate is constant", decay)
    elif opt.decay_steps is None:
        if updates is not None:
            yield Problem((f"{key}.decay_steps", decay), f"required by {opt.decay} decay")
    elif opt.warmup_steps >= opt.decay_steps:
        message = f"{opt.warmup_steps} warm-up updates leave none of the {opt.decay_steps} updates for the decay"
        yield Problem((f"{key}.warmup_steps", f"{key}.decay_steps"), message)
    elif updates is not None and updates > opt.decay_steps and not opt.min_lr and "min_lr" not in opt.model_fields_set:
        message = (
            f"{opt.decay_steps} of {updates} updates: the others would have a learning rate of 0: decay over all of "
            "them, or set min_lr (0.0 if that is intended)"
        )
        yield Problem((f"{key}.decay_steps", f"{key}.min_lr"), message)
    if opt.min_lr > opt.lr:
        yield Problem((f"{key}.min_lr", f"{key}.lr"), f"{opt.min_lr} is above the learning rate {opt.lr}")


def check_layers(cfg: Config, archs: Archs, machine: Machine) -> Iterator[Problem]:
    """Checks `layers: transformer_engine` against dtype, machine and model family."""
    for key in asks_for_transformer_engine(cfg):
        if cfg.model.dtype == "float32":
            what = "transformer-engine computes float32 in TF32, with errors near 1e-3 and no flash attention"
            yield Problem((key, "model.dtype"), f"{what}: use local or auto, or dtype bfloat16")
        elif machine.gpus == 0:
            yield Problem((key,), "transformer_engine needs GPUs, and this machine has none: use auto or local")
        arch = archs.get(key.removesuffix(".layers"))
        if arch is not None and (lacks := FAMILIES[arch.family].local_only) is not None:
            message = f"transformer_engine has no layers for {arch.family}, which needs {lacks}: use auto or local"
            yield Problem((key, "model.path"), message)


def check_heads(cfg: RLConfig, archs: Archs) -> Iterator[Problem]:
    """Checks that `heads` and `std_coef` have an effect on the reward model."""
    judge, arch = cfg.reward.model, archs.get("reward.model")
    if judge is None:
        return
    if arch is not None and arch.score_heads == 1:
        names, because, other = ["heads", "std_coef"], "it has one score head", "reward.model.path"
        yield from without_effect(judge, "reward.model", names, because, other)
    elif judge.heads == "min":
        because, other = "heads: min uses the lowest score", "reward.model.heads"
        yield from without_effect(judge, "reward.model", ["std_coef"], because, other)


def check_critic(cfg: RLConfig) -> Iterator[Problem]:
    """Checks for settings without effect on a frozen critic, and for warm-up that never ends."""
    if cfg.critic is None:
        return
    if cfg.critic.frozen:
        names = ["warmup_steps", "optimizer", "recompute", "lora"]
        yield from without_effect(cfg.critic, "critic", names, "the critic is frozen", "critic.frozen")
        if cfg.critic.offload == "optimizer":
            message = "has no effect: a frozen critic has no optimizer: use none, or all to offload its parameters"
            yield Problem(("critic.offload", "critic.frozen"), message)
        yield from without_effect(cfg.algorithm, "algorithm", ["value_loss"], "the critic is frozen", "critic.frozen")
    elif cfg.critic.warmup_steps >= cfg.run.steps:
        message = f"{cfg.critic.warmup_steps} critic-only steps of {cfg.run.steps}: the actor would never be trained"
        yield Problem(("critic.warmup_steps", "run.steps"), message)
