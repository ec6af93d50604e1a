"""Model card in Markdown. Every sentence is about something that the run has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from mrl.cards.base_model import CLASSIFIES, CLASSIFIES_TOKENS, GENERATES, SEES, ExportKind
from mrl.cards.facts import CardFacts, MetricSummary
from mrl.directories import size_text
from mrl.observe.progress import clock
from mrl.observe.report import FIRST_CURVE

STALE_DRAFTS = (
    "The multi-token prediction layers are the base model's, unchanged: they were not trained together with these "
    "weights. Speculative decoding with them gives the same distribution, but may accept fewer tokens."
)
AUTO_CLASSES = {
    GENERATES: "AutoModelForCausalLM",
    CLASSIFIES: "AutoModelForSequenceClassification",
    CLASSIFIES_TOKENS: "AutoModelForTokenClassification",
    SEES: "AutoModelForImageTextToText",
}
HIDDEN_IN_TEXT = str.maketrans({"|": "\\|", "\n": " "})


def render(facts: CardFacts, *, has_curve: bool) -> str:
    """Returns the whole README.md except its seal. has_curve: FIRST_CURVE lies beside it."""
    measured = facts.measured()
    parts = [
        f"---\n{_front(facts, measured)}\n---",
        f"# {facts.name}",
        _sentence(facts),
        "\n".join(_results(facts, measured, has_curve)),
        table("Data", ("source", "size", "digest"), _data(facts)),
        "\n".join(f"- {note}" for note in facts.notes),
        "\n".join(usage(facts.kind)),
        table("Weights", ("", ""), list(_weights(facts).items())),
        table("How it was made", ("", ""), list(_making(facts).items())),
        "\n".join(_limits(facts)),
        _config(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(facts: CardFacts, measured: list[MetricSummary]) -> str:
    """Front matter with the hub's metadata."""
    counts = ("validation/scored", "validation/of")
    held_out = [m for m in measured if m.name.startswith("validation/") and not m.name.startswith(counts)]
    task, is_adapter = facts.kind.task, facts.kind.is_adapter
    about = str(_inner(facts.config, "data", "validation") or "the run's validation prompts")
    results = [
        EvalResult(task, about, about, m.name.removeprefix("validation/"), m.last, metric_name=m.name) for m in held_out
    ]
    base = facts.base
    terms: dict[str, Any] = dict(base.license) if base else {}
    data = ModelCardData(
        base_model=base.name if base else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        datasets=_names(facts, "/") or None,
        tags=[
            "mrl",
            *(["lora"] if is_adapter else []),
            *([facts.method.split(" (")[0].lower().replace(" ", "-")] if facts.method else []),
        ],
        model_name=facts.name if results else None,
        eval_results=results or None,
        **terms,
    )
    return data.to_yaml().strip()


def _sentence(facts: CardFacts) -> str:
    start = f"`{facts.base.name}`" if facts.base else "random weights"
    sources = ", ".join(f"`{name}`" for name in _names(facts))
    judge = _inner(facts.config, "reward", "function")
    words = f"{start} after {facts.step} steps of {facts.method or 'training'}"
    words += f" on {sources}" if sources else ""
    words += f", with the reward `{judge}`" if judge else ""
    return f"{words[0].upper()}{words[1:]}."


def _results(facts: CardFacts, measured: list[MetricSummary], has_curve: bool) -> Iterator[str]:
    if not measured:
        return
    yield "## Results\n"
    if has_curve:
        yield f"![by step]({FIRST_CURVE})\n"
    yield "| metric | first | best | last |\n|---|---|---|---|"
    for m in measured:
        best = "" if m.best is None else f"{m.best:.4g} (step {m.best_step})"
        yield f"| `{m.name}` | {m.first:.4g} | {best} | {m.last:.4g} |"


def _data(facts: CardFacts) -> list[tuple[str, ...]]:
    return [(f"`{of.name}`", size_text(of.bytes), f"blake2b {of.digest}") for of in facts.data]


def _names(facts: CardFacts, part: str = "") -> list[str]:
    """Names of the data sources that contain `part`; names on the hub have a slash."""
    return list(dict.fromkeys(of.name for of in facts.data if part in of.name))


def usage(kind: ExportKind) -> Iterator[str]:
    """Yields code that loads the model with transformers and SGLang."""
    if kind.is_vision_reward_model:
        yield "## Use\n\n```python\nfrom transformers import AutoModel, AutoProcessor"
        yield '\nbody = AutoModel.from_pretrained(PATH, dtype="auto")'
        yield "processor = AutoProcessor.from_pretrained(PATH)\n```\n"
        yield "transformers has no class with its head. The score is `score.weight` of the safetensors times the body's"
        where = "the last token of the text" if kind.task == CLASSIFIES else "the end of each step"
        yield f"last hidden state at {where}."
        return
    name = AUTO_CLASSES[kind.task]
    whole = "BASE" if kind.is_adapter else "PATH"
    reader = "AutoProcessor" if kind.task == SEES else "AutoTokenizer"
    yield f"## Use\n\n```python\nfrom transformers import {name}, {reader}"
    yield f'\nmodel = {name}.from_pretrained({whole}, dtype="auto")'
    if kind.is_adapter:
        yield "model = peft.PeftModel.from_pretrained(model, PATH)"
    yield f"{reader.removeprefix('Auto').lower()} = {reader}.from_pretrained({whole})\n```\n"
    flags = " --enable-lora --lora-paths NAME=PATH" if kind.is_adapter else ""
    flags += " --is-embedding" if kind.task == CLASSIFIES else ""
    if not (kind.is_adapter and kind.task != GENERATES) and kind.task != CLASSIFIES_TOKENS:
        yield f"```\npython -m sglang.launch_server --model-path {whole}{flags}\n```"
    if kind.is_adapter:
        yield "\n`mrl merge BASE PATH OUT` merges the adapters into the base model."
    if kind.task == CLASSIFIES:
        yield "\nThe score is the one at the last token of the text."


def _weights(facts: CardFacts) -> dict[str, str]:
    found = {"architecture": f"`{facts.kind.architecture}`"} if facts.kind.architecture else {}
    how = "" if facts.files == 1 else " (of the output of `sha256sum *.safetensors`)"
    found |= {"SHA-256": f"`{facts.digest}`{how}"} if facts.digest else {}
    if facts.base:
        found["base"] = f"`{facts.base.name}`" + (f", revision {facts.base.revision}" if facts.base.revision else "")
    found |= {"SHA-256 of the base": f"`{facts.base_digest}`"} if facts.base_digest else {}
    return found | facts.tokenizer


def _making(facts: CardFacts) -> dict[str, str]:
    layout = _inner(facts.config, "actor", "parallel") or {}
    split = [f"{name} {layout[name]}" for name in ("tensor", "pipeline", "context", "expert") if layout.get(name)]
    ranks = f"{facts.ranks} ranks: " if facts.ranks else ""
    made = {"steps": f"{facts.step} of {_inner(facts.config, 'run', 'steps')}"}
    made["total time of all phases"] = clock(facts.total("time/"))
    made |= {"tokens": f"about {facts.tokens:.3g}"} if facts.tokens else {}
    made["layout of the actor"] = ranks + ", ".join(split)
    made["seed"] = str(_inner(facts.config, "run", "seed"))
    made["versions"] = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    made |= {"commit of mrl": f"`{facts.commit}`"} if facts.commit else {}
    return made


def _limits(facts: CardFacts) -> Iterator[str]:
    """Yields known limits of the result, as far as the run recorded them."""
    steps, skipped = _inner(facts.config, "run", "steps"), facts.total("actor/skipped")
    found = []
    if not any(name.startswith("validation/") for row in facts.rows for name in row):
        found.append("There was no held-out data: the results above are on training data.")
    if isinstance(steps, int) and facts.step < steps:
        found.append(f"The run was planned for {steps} steps; these weights are from step {facts.step}.")
    if skipped:
        found.append(f"Updates skipped because a loss or gradient was not finite: {skipped:.0f}.")
    if facts.kind.has_drafts:
        found.append(STALE_DRAFTS)
    if facts.base and not facts.base.license:
        found.append("The base model's directory states no license.")
    if found:
        yield "## Known limits\n"
        yield from (f"- {line}" for line in found)


def _config(facts: CardFacts) -> str:
    text = yaml.safe_dump(facts.config, sort_keys=False, allow_unicode=True)
    fence = "```" if "```" not in text else "~~~~"
    return f"<details><summary>Configuration</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [head, ("---",) * len(head), *(tuple(cell.translate(HIDDEN_IN_TEXT) for cell in row) for row in rows)]
    return f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inner(config: dict[str, Any], section: str, key: str) -> Any:
    found = config.get(section)
    return found.get(key) if isinstance(found, dict) else None
