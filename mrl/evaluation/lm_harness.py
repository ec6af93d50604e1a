"""Tasks of lm-evaluation-harness on a model directory, by its own transformers model in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mrl import platform
from mrl.config.schema import Config
from mrl.evaluation.estimates import Estimate
from mrl.packages import pip_install_extra

Z = 1.96  # of the 95 % interval around a mean, by the harness's standard error


def lm_eval_scores(
    cfg: Config, weights: str, tasks: Sequence[str], folder: Path | None, rows: int | None
) -> dict[str, Any]:
    """Returns the harness's metrics of each task, as TASK/METRIC; those with a standard error with their interval.

    Prompts use the chat template if those of the run do. Without GPUs it computes in float32.

    Args:
        tasks: names of tasks or groups.
        folder: task files besides the harness's own.
        rows: number of documents of each task; None: all.

    Raises:
        ValueError: if the harness is not installed, a task is unknown, or the evaluation fails.
    """
    if find_spec("lm_eval") is None:
        raise ValueError(f"--lm-eval needs the package lm_eval, which is not installed: {pip_install_extra('lm-eval')}")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in tasks if name not in known.all_tasks]:
        raise ValueError(f"--lm-eval: lm_eval has no task {', '.join(unknown)}: lm-eval ls tasks lists all")
    on_cpu = platform.device().type == "cpu"
    try:
        model = HFLM(
            pretrained=weights,
            dtype="float32" if on_cpu else cfg.model.dtype,
            device="cpu" if on_cpu else "cuda",
            trust_remote_code=False,
        )
        found = simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=rows,
            task_manager=known,
            apply_chat_template=cfg.data.chat_template,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except Exception as error:  # the harness's, the data set's or the model's
        raise ValueError(f"lm_eval failed: {type(error).__name__}: {error}") from error
    return _read(found["results"])


def _read(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    metrics, estimates = dict[str, float](), dict[str, dict[str, float]]()
    for task, values in results.items():
        for key, value in values.items():
            name, _, applied = key.partition(",")
            if name == "sample_len" or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            shown = f"{task}/{name}" if applied in ("", "none") else f"{task}/{name} ({applied})"
            error = values.get(f"{name}_stderr,{applied}")
            if isinstance(error, int | float):
                estimates[shown] = asdict(Estimate(value, value - Z * error, value + Z * error))
            else:
                metrics[shown] = float(value)
    return {"metrics": metrics, "estimates": estimates}
