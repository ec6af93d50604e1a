"""The reward of `make quickstart-real`, and preference pairs of judged answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROW = {"prompt": "State the final answer: 4 - 7 =", "answer": "-3", "data_source": "chain_sum"}


@pytest.mark.parametrize(
    ("response", "score", "right"),
    [
        ("-3", 1.0, 1.0),
        ("4 - 7 = -3.", 1.0, 1.0),
        ("The answer is -3", 1.0, 1.0),
        ("-3 is the answer", 0.0, 0.0),  # the text continues after the number
        ("4 - 7 = -2", 0.36, 0.0),
        ("4 - 7 = -12", 0.04, 0.0),
        ("4 - 7 = -40", 0.0, 0.0),
        ("4 - 7 = 3", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_right_number_at_the_end_scores_and_a_near_one_of_its_sign_a_little(
    response: str, score: float, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym", reason="extra tasks")
    monkeypatch.syspath_prepend(str(ROOT / "yaml_configs" / "rewards"))
    from reasoning_gym_tasks import final_number, number_or_near  # type: ignore[import-not-found]

    assert number_or_near("", response, ROW) == pytest.approx({"score": score, "right": right})
    assert final_number("", response, ROW) == right


def test_pairs_are_of_a_right_and_a_wrong_answer_to_one_prompt(tmp_path: Path) -> None:
    samples = [
        {"prompt": "a", "responses": ["1", "2", "3", "4"], "scores": [1.0, 0.0, 1.0, 0.2]},
        {"prompt": "b", "responses": ["5", "6"], "scores": [0.0, 0.0]},
        {"prompt": "c", "responses": ["7", "8", "9"], "scores": [0.0, 1.0, 1.0]},
    ]
    (tmp_path / "eval.json").write_text(json.dumps({"samples": samples}))

    def made(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/make_pairs.py", str(tmp_path / "eval.json"), str(tmp_path), *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert made("--held-out", "1").returncode == 0
    files = [tmp_path / f"{name}.jsonl" for name in ("train", "held_out")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = sorted((row["prompt"], row["chosen"], row["rejected"]) for row in rows)
    assert found == [("a", "1", "2"), ("a", "3", "4"), ("c", "8", "7")]
    by_file = [{json.loads(line)["prompt"] for line in file.read_text().splitlines()} for file in files]
    assert sorted(map(sorted, by_file)) == [["a"], ["c"]], "no prompt is in both files"
    refused = made("--held-out", "2")
    assert refused.returncode != 0 and "2 prompts with right and wrong answers, and 2 are held out" in refused.stderr


def test_a_quickstart_by_another_python_names_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import quickstart  # type: ignore[import-not-found]

    monkeypatch.setattr(quickstart, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "grpo"])
    with pytest.raises(SystemExit):
        quickstart.main()
    said = capsys.readouterr().err
    assert f"{sys.executable} has no torch: use {ROOT}/.venv/bin/python, which `make quickstart` creates" in said


def test_every_quickstart_trains_a_configuration_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import quickstart  # type: ignore[import-not-found]

    names = [file.stem.removeprefix("quickstart_") for file in (ROOT / "yaml_configs").glob("quickstart_*.yaml")]
    monkeypatch.setattr(quickstart, "run", lambda what, *command: commands.append(command))
    monkeypatch.setattr(quickstart.shutil, "rmtree", lambda *_, **__: None)
    for name in (name for name in names if not name.endswith(("sft", "contrast")) and not name.startswith("ddpo")):
        commands: list[tuple[str, ...]] = []
        overrides = ("run.seed=2",) if name.startswith("real") else ()
        monkeypatch.setattr(sys, "argv", ["quickstart.py", name, *overrides])
        quickstart.main()
        trains = [command[3:] for command in commands if command[:3] == ("-m", "mrl", "train")]
        trained = [config for config, *_ in trains]
        assert trains[-1][1:] == overrides
        assert trained[-1] == f"yaml_configs/quickstart_{name}.yaml"
        assert all((ROOT / config).is_file() for config in trained)
        assert all((ROOT / command[0]).is_file() for command in commands if command[0].startswith("tools/"))
