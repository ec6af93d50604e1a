"""Do the files that a configuration names exist, and are they what it says? Reads first lines and config.json only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.config.data_checks import check_sources
from mrl.config.layout_checks import Archs
from mrl.config.model_dirs import is_converted, read_converted
from mrl.config.problems import Problem, reason
from mrl.config.reward_checks import check_function, check_functions
from mrl.config.schema import RLConfig, SFTConfig
from mrl.models.arch import ModelArch, UnsupportedModel, is_reward_model, load_arch


def read_archs(cfg: RLConfig | SFTConfig, problems: list[Problem]) -> Archs:
    """The shapes of the run's models; what is wrong with their directories is added to `problems`."""
    model = cfg.model
    actor = _arch("model.path", model.path, problems)
    if actor is not None and not model.from_scratch:
        problems.extend(_weights("model.path", model.path, model.allow_pickle))
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


def check_files(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    yield from check_sources(cfg)
    if isinstance(cfg, RLConfig):
        yield from check_functions(cfg.reward)
        if cfg.algorithm.filter_groups.function is not None:
            yield from check_function("algorithm.filter_groups.function", cfg.algorithm.filter_groups.function)
