"""User-defined policy losses and advantage estimators, `path/to/file.py:name`, whose results are checked on every call.

A loss is f(PolicyInputs, **options) -> TokenLoss of the inputs' shape. An estimator is f(AdvantageInputs, **options) ->
(advantages, returns), both [B, T]. Loading runs each one on a few tokens, which finds most mistakes before a run
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrl import user_functions
from mrl.algo import advantages, policy_loss
from mrl.algo.advantages import AdvantageInputs, Estimator
from mrl.algo.policy_loss import PolicyInputs, PolicyLoss, TokenLoss
from mrl.algo.sequences import Sequences
from mrl.stopping import Stopped
from mrl.user_functions import FunctionError

LOSS_KEY, ESTIMATOR_KEY = "algorithm.policy_loss.function", "algorithm.advantage.function"
Options = Mapping[str, float | str | bool]
TRIAL_MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [False, False, False]])


def load_custom_loss(spec: str, options: Options) -> PolicyLoss:
    """Returns the user's loss with its options bound, f(PolicyInputs) -> TokenLoss.

    Raises FunctionError if it cannot be loaded or fails on a few tokens; the returned function raises it for bad
    results.
    """
    return _loss(spec, tuple(sorted(options.items())))


def load_custom_estimator(spec: str, options: Options, has_values: bool) -> Estimator:
    """Returns the user's estimator with its options bound, f(AdvantageInputs) -> (advantages, returns) [B, T], 0
    outside the mask.

    has_values: True if a critic provides values. Raises FunctionError as `load_custom_loss` does.
    """
    return _estimator(spec, tuple(sorted(options.items())), has_values)


@cache
def _loss(spec: str, options: tuple[tuple[str, Any], ...]) -> PolicyLoss:
    where, function, given = _load(spec, LOSS_KEY, options)

    def loss(inputs: PolicyInputs) -> TokenLoss:
        tokens = _called(where, function, inputs, given)
        if not isinstance(tokens, TokenLoss):
            raise FunctionError(f"{where} must return a TokenLoss, got {type(tokens).__name__}")
        of = (inputs.log_probs, inputs.old_log_probs, inputs.advantages)
        maybe = {"clipped": tokens.clipped, "clipped_lower": tokens.clipped_lower}
        parts = [(name, part) for name, part in maybe.items() if part is not None]
        for name, part in [("value", tokens.value), *parts, *tokens.metrics.items()]:
            _check(f"{where}: {name}", part, inputs.log_probs, of)
        return tokens

    loss.__dict__["metrics"] = getattr(function, "metrics", ())
    _tried(where, lambda: _try_loss(loss))
    return loss


def _try_loss(loss: PolicyLoss) -> None:
    count = int(TRIAL_MASK.sum())
    log_probs = torch.linspace(-2.0, -0.1, count).requires_grad_()
    total, _ = policy_loss.compute(
        loss,
        log_probs=log_probs,
        old_log_probs=log_probs.detach() - torch.linspace(-0.1, 0.2, count),
        advantages=torch.linspace(1.0, -1.0, count),
        weights=torch.ones(count),
        sequences=Sequences.of_mask(TRIAL_MASK),
    )
    if not total.requires_grad:
        raise ValueError("the value does not depend on log_probs, so there is no gradient")
    total.backward()
    if log_probs.grad is None or not bool(log_probs.grad.isfinite().all()):
        raise ValueError("the gradient with respect to log_probs is missing or not finite")


@cache
def _estimator(spec: str, options: tuple[tuple[str, Any], ...], has_values: bool) -> Estimator:
    where, function, given = _load(spec, ESTIMATOR_KEY, options)

    def estimator(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        made = _called(where, function, inputs, given)
        if not isinstance(made, tuple) or len(made) != 2:
            raise FunctionError(f"{where} must return (advantages, returns), got {type(made).__name__}")
        of = [inputs.token_rewards, *([] if inputs.values is None else [inputs.values])]
        inside = [x.masked_fill(~inputs.mask, 0) for x in of]
        for name, part in zip(("advantages", "returns"), made, strict=True):
            _check(f"{where}: {name}", part, inputs.token_rewards, inside, inputs.mask)
        adv, returns = (x.detach().to(inputs.token_rewards.dtype).masked_fill(~inputs.mask, 0) for x in made)
        return adv, returns

    values = torch.linspace(0.1, 0.5, TRIAL_MASK.numel()).view(TRIAL_MASK.shape) if has_values else None
    rewards = torch.linspace(0.0, 1.0, TRIAL_MASK.numel()).view(TRIAL_MASK.shape) * TRIAL_MASK
    group = torch.tensor([0, 0, 1, 1])
    tensors = {"token_rewards": rewards, "response_mask": TRIAL_MASK, "group": group}
    _tried(where, lambda: advantages.compute(estimator, **tensors, values=values))
    return estimator


def _load(spec: str, key: str, options: tuple[tuple[str, Any], ...]) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Returns (the name used in errors, the function, its options)."""
    given = dict(options)
    signature = f"({', '.join(['inputs', *(f'{name}=' for name in given)])})"
    return f"{key} {spec!r}", user_functions.load(spec, key, (None,), signature, given), given


def _called(where: str, function: Callable[..., Any], inputs: PolicyInputs | AdvantageInputs, given: Options) -> Any:
    """Calls the function.

    Raises FunctionError if it exits the process or writes into its input tensors, which are used later.
    """
    before = {name: x._version for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    try:
        made = function(inputs, **given)
    except Stopped:  # by a signal, whose exit code counts
        raise
    except SystemExit as error:
        raise FunctionError(f"{where} calls sys.exit({error.code!r})") from error
    if changed := [name for name, version in before.items() if vars(inputs)[name]._version != version]:
        raise FunctionError(f"{where} changes {', '.join(changed)} in place: make a new tensor")
    return made


def _tried(where: str, run: Callable[[], object]) -> None:
    try:
        run()
    except FunctionError as error:
        raise FunctionError(f"{error} (tried out on a few tokens)") from error
    except Exception as error:
        what = [type(error).__name__, *str(error).splitlines()[:1]]
        raise FunctionError(f"{where}, tried out on a few tokens: {': '.join(what)}") from error


def _check(what: str, part: Any, like: Tensor, of: Iterable[Tensor], mask: Tensor | None = None) -> None:
    """Raises FunctionError unless `part` holds one number a token, finite where all of its inputs `of` are finite."""
    if not isinstance(part, Tensor) or part.shape != like.shape:
        got = f"shape {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
        raise FunctionError(f"{what} must be a tensor of the inputs' shape {list(like.shape)}, got {got}")
    if part.device != like.device:
        raise FunctionError(f"{what} is on {part.device}, the inputs are on {like.device}")
    if part.is_complex():
        raise FunctionError(f"{what} has complex numbers")
    bad = ~part.isfinite() if mask is None else ~part.isfinite() & mask
    if bool(bad.any()) and all(bool(x.isfinite().all()) for x in of):
        raise FunctionError(
            f"{what} is NaN or infinite at {int(bad.sum())} of {bad.numel()} places, its inputs are finite"
        )
