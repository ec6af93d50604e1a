"""Checkpoints: exact continuation, loads under other layouts, and failing saves and loads."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.checkpoint import directory
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import DELTA_FAMILIES
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

PAIR = ("tp2.pp2", "dp4", *slow_cases("pp4", "tp4", "pp2.vpp2"))  # the first is the layout that was saved
MOE = ("ep2", *slow_cases("ep1", "ep4"), "tp2.ep2.pp2")
TIED = ("dp4", *slow_cases("pp2"), "pp2.vpp2")  # one copy of the embedding at the save, two at the load
FAMILIES: dict[str, tuple[str, ...]] = dict(  # an actor and a critic of each
    slow_cases(
        ("gemma3_text", ("tp2.pp2", "dp4")),
        ("deepseek_v3", ("tp2.ep2", "pp2.ep2")),
        ("olmo3", ("tp2.pp2", "cp2")),
        ("qwen2_moe", ("pp2.ep2", "tp2.ep2")),
        ("phi3", ("tp2.pp2", "dp4")),
        ("smollm3", ("pp2", "tp2.pp2")),
        ("gpt_oss", ("tp2.ep2", "pp2.ep2")),
    )
)
FAMILIES |= dict.fromkeys(DELTA_FAMILIES[:1], ("tp2.ep2", "pp2.ep2"))
# a key's bias hardly affects attention, so Adam's step for it depends on rounding
OWN = {"qwen2_moe": {"qkv_bias": False}}
LAYOUTS = {"pair": PAIR, "moe": MOE, "tied": TIED} | FAMILIES
SHAPE: dict[str, Any] = {
    "weights": False,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "vocab_size": 321,  # padded to different sizes at TP1, TP2 and TP4
}

Cases = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def world(tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Returns the reports of a world of 4 processes, by case."""
    work = tmp_path_factory.mktemp("checkpoints")
    models = [
        tiny_models("llama", tied=True, num_hidden_layers=4, **SHAPE),
        tiny_models("glm4_moe", moe_intermediate_size=32, **(SHAPE | {"head_dim": 16})),  # its layers differ
        tiny_models("llama", tied=True, num_hidden_layers=2, **(SHAPE | {"hidden_size": 64})),
    ]
    made = {family: tiny_models(family, **SHAPE, **OWN.get(family, {})) for family in FAMILIES}
    first = [f"{name}={','.join(layouts)}" for name, layouts in (("pair", PAIR), ("moe", MOE), ("tied", TIED))]
    further = [f"{family}={made[family]}={','.join(layouts)}" for family, layouts in FAMILIES.items()]
    output = run_world(4, "checkpoints.py", work, *models, *first, *further)
    return {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.mark.parametrize(
    "case", [*(f"{name} {layouts[0]}" for name, layouts in LAYOUTS.items()), "bfloat16 started", "bfloat16 unstarted"]
)
def test_continues_bit_for_bit_as_if_never_stopped(world: Cases, case: str) -> None:
    assert world[case]["continued"] == 0.0


@pytest.mark.parametrize("layout", ["dp4", *slow_cases("pp2")])
def test_weights_of_two_types_load_into_another_layout(world: Cases, layout: str) -> None:
    assert world[f"bfloat16 {layout}"]["loaded"] == 0.0


def test_the_head_of_a_bfloat16_critic_is_trained_and_exported_in_float32(world: Cases) -> None:
    assert world["bfloat16 head"]["dtype"] == "torch.float32"
    assert world["bfloat16 head"]["rounding"] > 0.0


@pytest.mark.parametrize("case", [f"{name} {layout}" for name, layouts in LAYOUTS.items() for layout in layouts])
def test_weights_and_optimizer_load_unchanged_into_another_layout(world: Cases, case: str) -> None:
    result = world[case]
    assert result["before"] > 0.1, "the weights were the saved ones before the load"
    assert result["loaded"] == 0.0
    assert result["stored"] == dict.fromkeys(("counters", "weights", "param", "exp_avg", "exp_avg_sq"), 0.0)


@pytest.mark.parametrize("case", [f"{name} {layout}" for name, all_ in LAYOUTS.items() for layout in all_[1:]])
def test_continues_under_another_layout_up_to_round_off(world: Cases, case: str) -> None:
    assert world[f"{case.split()[0]} saved"]["moved"] > 5e-3, "updates too small to show a lost optimizer state"
    assert world[case]["continued"] <= 1e-5


def test_state_comes_back(world: Cases) -> None:
    assert world["pair dp4"]["state"] == {"step": 3, "kl_controller": {"value": 0.1}}


def test_training_goes_on_while_the_files_are_written(world: Cases) -> None:
    """Training continues while the files are written. The checkpoint does not contain those updates, and the older one
    is the latest until the new one is complete."""
    result = world["beside"]
    assert result["meanwhile"] == {"latest": "step_2", "written": 0, "writing": True}
    assert result["latest"] == "step_3" and result["step"] == 3
    assert result["loaded"] == 0.0 and set(result["stored"].values()) == {0.0}


def test_waiting_for_the_files_has_an_end(world: Cases) -> None:
    late = world["beside"]["late"]
    assert "step_3 is still being written after 0 s (rank 0, 1, 2, 3 of 4)" in late and "timeout_s" in late, late


@pytest.mark.parametrize("writers", ["every_rank", *slow_cases("one_node"), "one_rank"])
def test_ranks_write_at_once_or_in_turns(world: Cases, writers: str) -> None:
    """With `one_rank` the ranks of a node write in turns, else at the same time. All four ranks are on one node."""
    spans = sorted(span for rank in world[f"writers: {writers}"]["spans"] for span in rank)
    assert len(spans) == 8  # two models
    disjoint = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert disjoint == (writers == "one_rank")
    assert set(world["writers"]["stored"].values()) == {0.0}


def test_every_rank_goes_on_with_its_own_random_numbers(world: Cases) -> None:
    drawn = world["beside"]["draws"]
    assert all(after_save == after_load for after_save, after_load in drawn)
    assert len({tuple(after_save) for after_save, _ in drawn}) == 4


def test_a_writer_that_fails_beside_the_training_is_reported_on_every_rank(world: Cases) -> None:
    result = world["beside: a writer fails"]
    parts = ("writing", "step_4.tmp/actor", "rank 2: OSError", "File too large")
    assert all(part in result["message"] for part in parts), result["message"]
    assert result["names"] == ["step_2", "step_3"]
    assert result["latest"] == "step_5", "the next save works"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("save: rank 2 cannot write", ("step_2.tmp/actor", "MiB in all", "rank 2: OSError", "File too large")),
        ("save: state is not JSON", ("step_2 failed", "Tensor is not JSON serializable")),
        ("save: disk full", ("failing/checkpoints/step_2.tmp", "MiB needed, 1000 bytes free")),
    ],
)
def test_a_failed_save_leaves_only_what_was_there(world: Cases, case: str, parts: tuple[str, ...]) -> None:
    result = world[case]
    assert all(part in result["message"] for part in parts), result["message"]
    assert result["names"] == ["step_1"]
    assert result["latest"] == "step_1"


def test_saving_works_after_a_failure_and_removes_what_is_old(world: Cases) -> None:
    assert world["save: works again"]["names"] == ["step_2"]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("load: truncated", ("step_3 is damaged", ".distcp has", "bytes instead of")),
        ("load: missing", ("step_3 is damaged", ".distcp is missing")),
        ("load: one bit", ("step_3/actor/__1_", "is damaged: it differs from its checksums")),
        ("load: garbled", ("reading", "step_3/actor", "is damaged")),
        ("load: other model", ("hidden_size is 64 here and 32", "num_layers is 2 here and 4")),
        (
            "load: other learners",
            ("actor is a critic in this run and a policy in the checkpoint", "it has no reward, only actor, critic"),
        ),
        ("load: other names", ("value_head.weight is not in the checkpoint",)),
    ],
)
def test_a_load_that_cannot_work_says_why(world: Cases, case: str, parts: tuple[str, ...]) -> None:
    message = world[case]["message"]
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("kind", ["metadata", "format", "common", "tensor", "object", "random", "kept"])
def test_code_in_a_file_of_a_checkpoint_never_runs_and_the_file_is_named(world: Cases, kind: str) -> None:
    result = world[f"poisoned: {kind}"]
    assert not result["ran"]
    assert result["file"] in result["message"] and "\n" not in result["message"], result


def test_tied_copies_that_differ_are_noticed(world: Cases) -> None:
    assert all(world["tied copies"]["equal"])
    assert not all(world["tied copies"]["after_change"])


def write(
    run_dir: Path, step: int, keep_last: int = 10, keep_every_steps: int | None = None, best: int | None = None
) -> Path:
    """Writes a checkpoint without models."""
    final = directory.root(run_dir) / f"step_{step}"
    tmp = final.with_name(f"{final.name}.tmp")
    directory.begin(tmp)
    (tmp / "actor").mkdir()
    (tmp / "actor" / "weights").write_text("x" * step)
    directory.finish(tmp, final, {}, {"step": step})
    directory.prune(final.parent, keep_last, keep_every_steps, final, best)
    return final


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in directory.root(run_dir).iterdir())


READ = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from directory import hold_for_reading
with hold_for_reading(Path(sys.argv[1])):
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_reads_is_not_removed(tmp_path: Path) -> None:
    first = write(tmp_path, 1)
    reader = subprocess.Popen(
        [sys.executable, "-c", READ, str(first), str(Path(directory.__file__).parent)],  # without Megatron
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None and reader.stdout is not None
    try:
        assert reader.stdout.readline() == "reading\n"
        for step in (2, 3):
            write(tmp_path, step, keep_last=1)
        assert names(tmp_path) == ["step_1", "step_3"]
        with pytest.raises(ValueError, match="step_1 exists already, and another process is reading it"):
            write(tmp_path, 1)
        assert directory.read(first)[1] == {"step": 1}
        reader.stdin.close()
        assert reader.wait(60) == 0
    finally:
        reader.kill()
    write(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == ["step_4"]
