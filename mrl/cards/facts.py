"""Facts of an exported model: its run, its base, its data and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.cards.base_model import GENERATES, BaseModel, ExportKind, base_model, export_kind, tokenizer_facts
from mrl.cards.portable import last_part, portable
from mrl.observe.files import read_data_notes
from mrl.observe.method import method_of
from mrl.observe.metrics import Row, read_metrics
from mrl.packages import commit, versions
from mrl.weights.disk.digest import weight_files, whole_digest

PARTS = ("torch", "megatron-core", "transformers", "sglang", "transformer-engine")
HIGHER = ("reward/mean", "validation/score", "validation/mean", "rewards/accuracies", "rewards/margins",
          "validation/rewards/accuracies", "validation/rewards/margins",
          "critic/explained_variance")  # fmt: skip
LOWER = ("validation/loss", "validation/perplexity")
ALSO = ("actor/loss", "actor/entropy", "kl/ref", "response/mean_tokens", "mismatch/max_abs")


@dataclass(frozen=True)
class MetricSummary:
    """A metric over the run; best: None if neither higher nor lower is better."""

    name: str
    first: float
    last: float
    best: float | None
    best_step: int | None


@dataclass(frozen=True)
class DataSource:
    """Data source in public form; sources with the same name differ in their digests."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class WeightsOrigin:
    """Weights of a run.

    state: has a checkpoint's `config` and `data_contents`; part: name of the model, adapters/NAME if the run trains
    several adapters
    """

    run_dir: Path
    state: Mapping[str, Any]
    step: int
    part: str = "actor"

    @property
    def adapter(self) -> str:
        """Name of the adapter, if the run trains several; else empty."""
        folder, _, name = self.part.partition("/")
        return name if folder == "adapters" else ""

    @property
    def rows(self) -> list[Row]:
        """Returns the metrics up to these weights; of an adapter its own, and those of the whole run's speed."""
        rows = [row for row in read_metrics(self.run_dir) if row["step"] <= self.step]
        if not self.adapter:
            return rows
        own, shared = f"{self.adapter}/", ("time/", "perf/")
        return [
            {
                name.removeprefix(own): value
                for name, value in row.items()
                if name.startswith((own, *shared)) or "/" not in name
            }
            for row in rows
        ]

    @property
    def config(self) -> dict[str, Any]:
        """Returns the run's configuration; of an adapter as that of a run of it alone."""
        config = dict(self.state["config"])
        if not self.adapter:
            return config
        own = {key: value for key, value in config.pop("adapters")[self.adapter].items() if value is not None}
        for key, section in (("optimizer", "actor"), ("lora", "actor"), ("sampling", "rollout")):
            if key in own:
                config[section] = config[section] | {key: own.pop(key)}
        return config | own

    @property
    def data(self) -> dict[str, Any]:
        """Returns size and digest of the training data, by path."""
        found = dict(self.state.get("data_contents", {}))
        if self.adapter:
            found = {"data.train": found.get(f"adapters.{self.adapter}.data.train", found.get("data.train", {}))}
        return {path: contents for sources in found.values() for path, contents in sources.items()}

    @property
    def name(self) -> str:
        run, own = self.run_dir.resolve().name, self.adapter or self.part
        return run if own == "actor" else f"{run} ({own})"

    @property
    def base(self) -> Path | None:
        """Directory of the initial weights; None for random ones."""
        model, own = self.config["model"], self.config.get(self.part) or {}
        path = own.get("path") or (None if model.get("from_scratch") else model["path"])
        return Path(path) if path else None

    def base_files(self) -> list[Path]:
        return weight_files(self.base) if self.base else []


@dataclass(frozen=True)
class CardFacts:
    """Facts for a card. step: of the weights; config: in public form

    notes: rows left out or cut, one sentence each
    base: None for random initial weights; base_digest, digest: see `whole_digest`, empty if unknown
    """

    name: str
    step: int
    config: dict[str, Any]
    rows: list[Row]
    data: tuple[DataSource, ...] = ()
    notes: tuple[str, ...] = ()
    base: BaseModel | None = None
    base_digest: str = ""
    digest: str = ""
    files: int = 1
    kind: ExportKind = field(default_factory=lambda: ExportKind(GENERATES))
    tokenizer: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""

    @classmethod
    def of(
        cls, origin: WeightsOrigin, export: Path, digests: Mapping[str, str], base_digests: Mapping[str, str]
    ) -> CardFacts:
        """Collects the facts of the weights in `export`. digests, base_digests: of the weight files there and of the
        base.

        Raises UnreadableFile if the run's metrics are malformed.
        """
        found = origin.data
        notes = read_data_notes(origin.run_dir)
        for path in sorted(found, key=len, reverse=True):
            notes = [note.replace(path, last_part(path)) for note in notes]
        return cls(
            name=origin.name,
            step=origin.step,
            config=portable({key: value for key, value in origin.config.items() if value is not None}),
            rows=origin.rows,
            data=tuple(DataSource(last_part(path), of["bytes"], of["digest"]) for path, of in found.items()),
            notes=tuple(notes),
            base=base_model(origin.base) if origin.base else None,
            base_digest=whole_digest(base_digests),
            digest=whole_digest(digests),
            files=len(digests),
            kind=export_kind(export),
            tokenizer=tokenizer_facts(export),
            versions=versions("mrl", *PARTS),
            commit=commit() or "",
        )

    @property
    def method(self) -> str:
        return method_of(self.config)

    def measured(self) -> list[MetricSummary]:
        """Returns first, last and best value of the main metrics, in the order of the table."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        wanted = [*HIGHER, *LOWER, *(n for n in names if n.startswith("validation/") and n not in HIGHER + LOWER)]
        return [self._measured(name) for name in (*wanted, *ALSO) if name in names]

    def _measured(self, name: str) -> MetricSummary:
        points = [(row[name], int(row["step"])) for row in self.rows if name in row]
        best = max(points) if name in HIGHER else min(points) if name in LOWER else (None, None)
        return MetricSummary(name, points[0][0], points[-1][0], *best)

    def total(self, prefix: str) -> float:
        """Sums the metrics with this prefix over the run's steps."""
        return sum(value for row in self.rows for name, value in row.items() if name.startswith(prefix))

    @property
    def tokens(self) -> float:
        """Returns the tokens of all steps, sampled or trained on."""
        return sum(
            row.get("perf/tokens_per_s", 0.0) * sum(v for name, v in row.items() if name.startswith("time/"))
            for row in self.rows
        )

    @property
    def ranks(self) -> int | None:
        for row in reversed(self.rows):
            if each := row.get("perf/tokens_per_s_per_rank"):
                return round(row["perf/tokens_per_s"] / each)
        return None
