"""Are the directories of the models what the configuration says (reads config.json, no weights); do settings fit?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.config import tokenizer_files
from mrl.config.checks.base import Archs, inert
from mrl.config.derived import Machine, trained
from mrl.config.model_dirs import is_converted, read_converted
from mrl.config.problems import Problem, reason
from mrl.config.schema import OptimizerConfig, RLConfig, SFTConfig
from mrl.models.arch import ModelArch, UnsupportedModel, is_reward_model, load_arch


def read_archs(cfg: RLConfig | SFTConfig, problems: list[Problem]) -> Archs:
    """The shapes of the run's models; what is wrong with their directories is added to `problems`."""
    model = cfg.model
    actor = _arch("model.path", model.path, problems)
    if actor is not None and not model.from_scratch:
        problems.extend(_weights("model.path", model.path, model.allow_pickle))
    if actor is not None:
        found_in_tokenizer = tokenizer_files.problems(model.path, actor.vocab_size, model.eos_token)
        problems.extend(Problem((key,), message) for key, message in found_in_tokenizer)
    if not isinstance(cfg, RLConfig):
        return Archs(actor, None, None)
    others = {"critic.path": cfg.critic.path if cfg.critic else None, "ref.path": cfg.ref.path}
    if cfg.reward.model is not None:
        others["reward.model.path"] = cfg.reward.model.path
    found: dict[str, ModelArch | None] = dict.fromkeys(others, actor)
    for key, path in others.items():
        if path is not None:
            found[key] = arch = _arch(key, path, problems)
            if arch is not None:
                problems.extend(_weights(key, path, model.allow_pickle))
            if arch is not None and actor is not None and arch.vocab_size != actor.vocab_size:
                message = f"vocabulary of {arch.vocab_size} tokens, the actor's has {actor.vocab_size}"
                problems.append(Problem((key, "model.path"), message))
    if found.get("reward.model.path") is not None and not is_reward_model(others["reward.model.path"] or ""):
        problems.append(Problem(("reward.model.path",), "has no score head: expected a ...ForSequenceClassification"))
    return Archs(actor, found["critic.path"], found["ref.path"], found.get("reward.model.path"))


def _arch(key: str, path: str, problems: list[Problem]) -> ModelArch | None:
    try:
        return load_arch(path)
    except UnsupportedModel as error:
        message = str(error)
    except FileNotFoundError:
        message = f"{path}/config.json does not exist: expected a Hugging Face model directory"
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
    pickled = any(Path(path).glob("*.bin"))
    if pickled and not allow_pickle:
        yield Problem(
            (key, "model.allow_pickle"), f"{path} has only pickled weights, which allow_pickle: true would read"
        )
    elif not pickled:
        may_be_random = key == "model.path"
        hint = "; from_scratch: true would start at random" if may_be_random else ""
        yield Problem((key, *["model.from_scratch"] * may_be_random), f"{path} has no safetensors{hint}")


def check_pickle(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    paths = (cfg.critic.path if cfg.critic is not None else None, cfg.ref.path) if isinstance(cfg, RLConfig) else ()
    if cfg.model.from_scratch and cfg.model.allow_pickle and not any(paths):
        yield Problem(("model.allow_pickle", "model.from_scratch"), "has no effect: from_scratch reads no weights")


def check_optimizers(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    yield from _optimizer("actor.optimizer", cfg.actor.optimizer)
    if isinstance(cfg, RLConfig) and cfg.critic is not None:
        yield from _optimizer("critic.optimizer", cfg.critic.optimizer)


def _optimizer(key: str, opt: OptimizerConfig) -> Iterator[Problem]:
    decay = f"{key}.decay"
    if opt.decay == "constant":
        yield from inert(opt, key, ["decay_steps", "min_lr"], "the learning rate is constant", decay)
    elif opt.decay_steps is None:
        yield Problem((f"{key}.decay_steps", decay), f"required by {opt.decay} decay")
    elif opt.warmup_steps >= opt.decay_steps:
        message = f"{opt.warmup_steps} warm-up updates leave none of the {opt.decay_steps} for the decay"
        yield Problem((f"{key}.warmup_steps", f"{key}.decay_steps"), message)
    if opt.min_lr > opt.lr:
        yield Problem((f"{key}.min_lr", f"{key}.lr"), f"{opt.min_lr} is above the learning rate {opt.lr}")
    for name, beta in (("beta1", opt.beta1), ("beta2", opt.beta2)):
        if beta == 1:
            yield Problem((f"{key}.{name}",), "must be below 1")


def check_layers(cfg: RLConfig | SFTConfig, machine: Machine) -> Iterator[Problem]:
    asked = [f"{key}.layers" for key, train in trained(cfg).items() if train.layers == "transformer_engine"]
    for key in asked:
        if cfg.model.dtype == "float32":
            message = (
                "transformer-engine multiplies float32 as TF32, with errors near 1e-3, and has no flash attention for "
                "it: use local or auto, or dtype bfloat16"
            )
            yield Problem((key, "model.dtype"), message)
        elif machine.gpus == 0:
            yield Problem((key,), "transformer_engine needs GPUs, this machine has none: use auto or local")


def check_critic(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.critic is None:
        return
    if cfg.critic.frozen:
        names = ["warmup_steps", "optimizer", "recompute"]
        yield from inert(cfg.critic, "critic", names, "the critic is frozen", "critic.frozen")
        yield from inert(cfg.algorithm, "algorithm", ["value_loss"], "the critic is frozen", "critic.frozen")
    elif cfg.critic.warmup_steps >= cfg.run.steps:
        message = f"{cfg.critic.warmup_steps} critic-only steps of {cfg.run.steps}: the actor would never be trained"
        yield Problem(("critic.warmup_steps", "run.steps"), message)
