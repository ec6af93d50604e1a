"""`mrl config` and docs/configuration.md, which are generated from the sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mrl.cli import main
from mrl.config import manual
from mrl.config.keys import Key, keys_of, walk
from mrl.config.schema import RLConfig, SFTConfig
from mrl.config.yaml_dialect import Loader

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


def keys(schema: type[RLConfig] | type[SFTConfig] = RLConfig) -> dict[str, Key]:
    return {key.path: key for key in walk(keys_of(schema))}


def test_the_documentation_is_what_the_sections_say() -> None:
    assert DOCS.read_text() == manual.markdown(), f"run: {manual.COMMAND}"


def test_every_key_has_a_meaning() -> None:
    assert [path for schema in (RLConfig, SFTConfig) for path, key in keys(schema).items() if not key.meaning] == []


def test_links_in_the_documentation_lead_somewhere() -> None:
    page = DOCS.read_text()
    headings = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^## (.+)", page, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == headings


@pytest.mark.parametrize(
    ("path", "values", "default", "meaning"),
    [
        ("actor.optimizer.lr", "number >= 0", "1e-6", "peak learning rate"),
        ("ema.decay", "number > 0, < 1", "0.992", "decay of the average"),
        ("run.nproc", "integer > 0 or null", "null", "processes on each machine"),
        ("data.train", "path | section | [path or section, ...]", None, "training rows"),
        ("ptx.data.train.weight", "number > 0 or null", "null", "relative share of the rows"),
        ("reward.recipe", "{NAME: {NAME: number, ...}, ...}", "{}", "data source"),
        ("reward.servers.NAME.retries", "integer >= 0", "3", "retries after"),
        ("critic", "section or null", "null", "The value model"),
        ("critic.recompute", "none | selective | full", "none", "activation recomputation"),
        ("algorithm.kl", "section", None, "A penalty"),
        ("algorithm.rollout_correction.rollout_is_threshold", "string", "'2.0'", '"2.0": truncate at 2'),
    ],
)
def test_a_key_says_what_it_can_be(path: str, values: str, default: str | None, meaning: str) -> None:
    key = keys()[path]
    assert (key.values, key.default) == (values, default)
    assert key.meaning.startswith(meaning)


def test_comments_above_a_key_and_behind_several_lines_are_its_own() -> None:
    loss, correction = "algorithm.policy_loss.", "algorithm.rollout_correction."
    assert keys()[f"{loss}loss_mode"].meaning == "the loss of a token or response; see mrl.algo"
    assert keys()[f"{correction}rollout_rs_threshold"].meaning.endswith('the others, the statistic: "0.01"')
    assert keys()[f"{correction}rollout_rs"].meaning.startswith("rejection criteria")


def test_defaults_are_the_schema_s() -> None:
    optimizer = {key.name: yaml.load(key.default or "", Loader) for key in keys()["actor.optimizer"].below}
    assert RLConfig.model_fields["actor"].default.optimizer.model_dump() == optimizer


def test_the_trainers_of_a_section() -> None:
    trainers = {(key.path, key.below[0].name): of for key, of in manual.manual().items() if key.below}
    assert trainers["rollout", "engine"] == "rl" and trainers["checkpoint", "every_steps"].startswith("rl, sft, dpo")
    assert trainers["batch", "samples_per_step"] == "sft"
    assert {"rl", "ddpo"} <= {of for key, of in manual.manual().items() if key.path == "batch"}


def test_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert re.search(r"\nrollout +rl +The engines that generate responses\n", capsys.readouterr().out)
    assert main(["config", "rollout"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("rollout:  # section; trainer: rl\n    The engines that generate responses.\n")
    assert "\nservers: 1  # integer > 0\n    engines that mrl starts on each node\n" in page
    assert "more: mrl config rollout.mismatch" in page
    assert main(["config", "rollout.mismatch.stop"]) == 0
    of_a_key = "rollout.mismatch.stop: 1  # number > 0 or null; trainer: rl\n    mean over"
    assert capsys.readouterr().out.startswith(of_a_key)
    assert main(["config", "batch"]) == 0
    page = capsys.readouterr().out
    assert "prompts_per_step:  # integer > 0, required" in page and "samples_per_step:" in page
    for path in ("reward.servers.my-judge.url", "reward.servers.url"):
        assert main(["config", path]) == 0
        assert capsys.readouterr().out.startswith("reward.servers.NAME.url:  # string, required; trainer: rl\n")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("rolout", "did you mean rollout?"),
        ("rollout.mismatch.stopp", "did you mean rollout.mismatch.stop?"),
        ("clip_ratio_low", "did you mean algorithm.policy_loss.clip_ratio_low?"),
        ("sampling.max_new_tokens", "did you mean rollout.sampling.max_new_tokens?"),
        ("batch.samples_per_stp", "did you mean batch.samples_per_step?"),
        ("gspo", "see `mrl config algorithm.policy_loss`"),
        ("gpg", "see `mrl config algorithm` and `mrl config algorithm.policy_loss`"),
        ("a\nb", "'a\\nb' is not a section or key of a configuration: see `mrl config`"),
        ("", "see `mrl config`"),
    ],
)
def test_an_unknown_key_gets_one_line(path: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", path]) == 2
    found = capsys.readouterr()
    assert said in found.err and len(found.err.splitlines()) == 1 and not found.out


def test_every_row_of_the_manual_s_tables_is_one_line() -> None:
    rows = [line for line in manual.markdown().splitlines() if line.startswith("|")]
    assert any("`step_separator`" in row for row in rows)
    assert [row for row in rows if not row.endswith("|")] == []
