"""Third-party environments: the rewards of each turn, and failures of environments."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from mrl.agents import AgentError
from mrl.agents.runner import AgentRunner
from mrl.algo import token_rewards
from mrl.config.schema import AgentConfig, BatchConfig, RewardConfig, RLConfig
from mrl.core import Prompt, Request, Rollout, Sample
from mrl.data import collate
from mrl.http_server import HttpServer
from mrl.observe.files import read_jsonl
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.sampling.dynamic_sampling import SamplingError
from mrl.sampling.saved_samples import plain, restored
from mrl.trainers.rl.generate import Generator
from mrl.trainers.rl.run import RLRun
from tests.helpers.simulated import SimulatedEngine
from tests.helpers.tiny import EOS
from tests.helpers.trajectories import play_all
from tests.system.agents.test_agent_endpoint import END, Model, parts
from tests.system.agents.test_agents import PARAMS, STRIPS, FakeEngine, ids_of, play, requests, tokenizer

PROGRAMS = '''
import os
from mrl.agents.environments import from_gymnasium, from_openenv

class Walk:
    """A gymnasium.Env that adds each action to its position and ends after 3 steps."""

    def reset(self, *, seed=None, options=None):
        assert isinstance(seed, int)
        self.at, self.left = (options or {}).get("start", 0), 3
        return self.at, {}

    def step(self, action):
        self.at, self.left = self.at + action, self.left - 1
        return self.at, action / 10, False, self.left == 0, {}

    def close(self):
        open(self.mark, "a").write("closed\\n")

def make(row):
    Walk.mark = row["mark"]
    return Walk()

def act(turn):
    if turn.number == 1:
        raise ValueError("a number, please")
    return int(turn.text[0])

Gym = from_gymnasium(make, act, show=lambda observation: f"at {observation}.", options="options")
Server = from_openenv(lambda row: row["url"], lambda turn: {"say": turn.text}, show=lambda seen: f"<{seen['echo']}>")

class Early:
    """Gives 1, 0 and .25, and speaks first."""

    def reset(self, row, rng):
        return "begin:"

    def step(self, turn):
        return "next", (1.0, 0.0, 0.25)[turn.number], turn.number == 2

class Nothing:
    """An environment that gives the rewards of the row, of which some are None."""

    def reset(self, row, rng):
        self.rewards = row["rewards"]

    def step(self, turn):
        return "next", self.rewards[turn.number], turn.number == len(self.rewards) - 1

async def talks(ctx, prompt):
    for word in ("one", "two", "three"):
        await ctx.generate()
        ctx.say([{"role": "user", "content": word}])
    await ctx.generate()
    return 1.0

async def some_fail(ctx, prompt):
    await ctx.generate()
    if ctx.row["fails"]:
        raise KeyError("the tool is gone")
    return 1.0
'''


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("environments") / "programs.py"
    file.write_text(PROGRAMS)
    return file


def test_an_environment_of_gymnasium_is_played(programs: Path, tmp_path: Path) -> None:
    row = {"mark": str(tmp_path / "mark"), "options": {"start": 5}}
    [sample] = play(programs, "Gym", count=1, row=row, max_turns=9)
    drawn = [m["content"] for m in sample.messages if m["role"] == "assistant"]
    numbers = [int(text[0]) for i, text in enumerate(drawn) if i != 1]
    said = [m["content"] for m in sample.messages if m["role"] == "environment"]
    assert said == ["at 5.", f"at {5 + numbers[0]}.", "a number, please", f"at {5 + sum(numbers[:2])}."]
    assert sample.environment["score"] == pytest.approx(sum(numbers) / 10)
    assert (tmp_path / "mark").read_text() == "closed\n"


class Echo(BaseHTTPRequestHandler):
    """An OpenEnv server that holds one episode."""

    episode, steps, seen = "", 0, list[dict[str, object]]()
    rewards: tuple[object, ...] = (0.5, 0.5)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        kind.seen.append(body)
        if self.path == "/reset":
            kind.episode, kind.steps = body["episode_id"], 0
            return self.answer({"observation": {"echo": "hello"}, "reward": None, "done": False})
        kind.steps += 1
        echo, reward = {"echo": body["action"]["say"]}, kind.rewards[min(kind.steps, len(kind.rewards)) - 1]
        self.answer({"observation": echo, "reward": reward, "done": kind.steps == len(kind.rewards)})

    def do_GET(self) -> None:
        self.answer({"episode_id": self.episode, "step_count": self.steps})

    def answer(self, told: object) -> None:
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def openenv() -> Iterator[tuple[str, type[Echo]]]:
    kind = type("Echo", (Echo,), {"seen": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", kind
        finally:
            server.shutdown()


def test_a_server_of_openenv_is_played(programs: Path) -> None:
    with openenv() as (url, kind):
        [sample] = play(programs, "Server", count=1, row={"url": url})
        again = [dict(each) for each in kind.seen]
        play(programs, "Server", count=1, row={"url": url})
        assert kind.seen == again * 2, "a trajectory that is made again does not ask the same"
    said = [m["content"] for m in sample.messages]
    assert said[0] == "<hello>" and said[2] == f"<{said[1]}>" and len(said) == 4
    assert sample.environment == {"score": 1.0}


class Sessions:
    """An OpenEnv server with an environment of two steps for each WebSocket."""

    def __init__(self, most: int) -> None:
        self.most, self.running, self.ended = most, 0, list[str]()
        self.server = HttpServer(self.answer, 0)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/ws"
        self.server.authenticated(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.running == self.most:
            told = {"code": "CAPACITY_REACHED", "message": "Server at capacity."}
            await socket.send_json({"type": "error", "data": told})
            await socket.close()
            return socket
        self.running, steps = self.running + 1, 0
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.ended.append("closed")
                break
            echo, steps = ("hello", 0) if asked["type"] == "reset" else (asked["data"]["say"], steps + 1)
            data = {"observation": {"echo": echo}, "reward": 0.5 if steps == 2 else None, "done": steps == 2}
            await socket.ping()
            await socket.send_json({"type": "observation", "data": data})
        self.running -= 1
        return socket


@pytest.mark.parametrize("most", [3, 1])
def test_each_trajectory_has_a_session_of_its_own(programs: Path, most: int) -> None:
    sessions = Sessions(most)
    with sessions.server as server:
        row = {"url": f"ws://127.0.0.1:{server.port}"}
        if most == 1:
            with pytest.raises(AgentError, match=r"CAPACITY_REACHED.: .*; start it with a max_concurrent_envs"):
                play(programs, "Server", row=row, workers=1, retries=0)
            return
        found = play(programs, "Server", row=row, workers=1, retries=0)
    assert [sample.environment for sample in found] == [{"score": 0.5}] * 3 and sessions.ended == ["closed"] * 3
    for sample in found:
        said = [m["content"] for m in sample.messages]
        assert said[0] == "<hello>" and said[2] == f"<{said[1]}>" and len(said) == 4


@pytest.mark.parametrize(
    ("rewards", "environment"), [((None, 0.25), {"score": 0.25}), ((True, None), {"score": 1.0}), ((None, None), {})]
)
def test_a_reward_of_null_is_none_and_never_zero(
    programs: Path, rewards: tuple[object, ...], environment: dict[str, float]
) -> None:
    with openenv() as (url, kind):
        kind.rewards = rewards
        [sample] = play(programs, "Server", count=1, row={"url": url}, workers=1)
    assert sample.environment == environment


@pytest.mark.parametrize("reward", ["1", [1], {}])
def test_a_reward_that_is_no_number_is_refused(programs: Path, reward: object) -> None:
    with openenv() as (url, kind), pytest.raises(AgentError, match="returned the reward .*must be a number or null"):
        kind.rewards = (reward,)
        play(programs, "Server", count=1, row={"url": url}, workers=1, retries=0)


@pytest.mark.parametrize(
    ("rewards", "settings", "environment"),
    [
        ([None, 0.0], {}, {"score": 0.0}),
        ([None, None], {}, {}),
        ([None, None, None], {"max_turns": 2}, {"score": 0.0}),  # the model did not get to the end
    ],
)
def test_a_program_without_a_reward_has_no_score(
    programs: Path, rewards: list[float | None], settings: dict[str, Any], environment: dict[str, float]
) -> None:
    [sample] = play(programs, "Nothing", count=1, row={"rewards": rewards}, workers=1, **settings)
    assert sample.environment == environment


@pytest.mark.parametrize("on_error", ["stop", "leave_out"])
def test_a_trajectory_without_a_score_is_a_failed_reward(programs: Path, on_error: str) -> None:
    [sample] = play(programs, "Nothing", count=1, row={"rewards": [None], "prompt": "go"}, workers=1)
    cfg = RewardConfig.model_validate({"function": "environment", "on_error": on_error, "workers": 1})
    said = "'environment' on sample 0 .*the environment gave no score: agent.rollout ended without any reward"
    with RewardManager(cfg) as rewards:
        if on_error == "stop":
            with pytest.raises(RewardError, match=f"(?s){said}"):
                rewards.collect([sample])
        else:
            rewards.collect([sample])
            assert re.search(said, sample.left_out, re.DOTALL) and np.isnan(sample.score)


def test_two_trajectories_on_a_server_of_one_episode_are_found_out(programs: Path) -> None:
    with (
        openenv() as (url, _),
        pytest.raises(AgentError, match="a server runs one episode at a time"),
    ):
        play(programs, "Server", count=2, row={"url": url}, workers=1, retries=0)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "ConnectionRefused"),
        ("ws://127.0.0.1:1", "ConnectionRefused"),
        ("here", "not a server address"),
    ],
)
def test_a_server_that_is_none_is_named(programs: Path, url: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        play(programs, "Server", count=1, row={"url": url}, workers=1, retries=0)


# ---- rewards of turns


def test_rewards_are_where_the_turns_end_that_they_are_for(programs: Path) -> None:
    [sample] = play(programs, "Early", count=1, by_turn=True)
    assert sample.token_rewards is not None and sample.token_rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0.25]
    assert sample.environment == {"score": 1.25} and sample.messages[0] == {"role": "environment", "content": "begin:"}
    [at_the_end] = play(programs, "Early", count=1)
    assert at_the_end.token_rewards is None and at_the_end.environment == {"score": 1.25}
    sample.score = 2.0  # the environment's reward and another one
    rollout = collate(0, [sample])
    assert rollout.token_rewards is not None
    early = rollout.dense(rollout.token_rewards)
    rewards = token_rewards.compute(rollout.scores, rollout.response_mask, early=early)
    assert rewards.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 1.0]] and float(rewards.sum()) == 2.0


# ---- rewritten histories


def test_thoughts_that_a_template_strips_begin_a_sequence_at_each_users_message(programs: Path) -> None:
    model = Model(STRIPS)
    begin = [{"role": "user", "content": "go"}]
    cfg = AgentConfig(rollout=f"{programs}:talks", thoughts="strip")
    agents = AgentRunner(cfg, model.tokenizer, ids_of(model.tokenizer, END), True, begins=lambda prompt: (begin, {}))
    first = tuple(model.tokenizer.encode_plain([model.tokenizer.render_prompt(begin)])[0])
    try:
        asked = [Request(0, 0, Prompt(0, first, {}, "go"), 3)]
        [sample] = play_all(agents, asked, PARAMS, model.generate)
    finally:
        agents.close()
    found = parts(sample)
    assert len(found) == 4 and [sum(drawn) for _, drawn in found] == [3] * 4
    for number, (ids, _) in enumerate(found):
        whole = [*begin, *sample.messages[: 2 * number]]
        assert ids[:-3] == model.tokenizer.encode_plain([model.tokenizer.render_prompt(whole)])[0]
    assert len({request.seed for request in model.asked}) == 4


def test_sequences_are_kept_and_come_back(programs: Path) -> None:
    [sample] = play(programs, "Early", count=1, by_turn=True)
    sample.sequence_lens = (10, len(sample.token_ids) - 10)
    prompt = Prompt(5, (9, 9), {"a": 1}, "go")
    back = restored(Request(4, 2, prompt, 7), json_like(plain(sample)))
    assert back.request.prompt.token_ids == sample.request.prompt.token_ids != prompt.token_ids
    assert back.request.prompt.row == {"a": 1} and back.request.sample_id == 4
    assert back.sequence_lens == sample.sequence_lens
    for name in ("response_ids", "log_probs", "action_mask", "token_rewards"):
        assert np.array_equal(getattr(back, name), getattr(sample, name)), name


def json_like(kept: dict[str, object]) -> dict[str, object]:
    """Returns the state as a checkpoint stores it: only tensors and plain values."""
    arrays = kept["arrays"]
    assert isinstance(arrays, dict) and all(isinstance(tensor, torch.Tensor) for tensor in arrays.values())
    return json.loads(json.dumps({k: v for k, v in kept.items() if k != "arrays"})) | {"arrays": arrays}


def test_steps_with_and_without_several_sequences_are_learnt_from_together(programs: Path) -> None:
    several, one = (collate(step, play(programs, "Early", count=1)) for step in range(2))
    several = replace(
        several, sequence_counts=torch.tensor([2]), sequence_lens=torch.tensor([4, several.seq_lens[0] - 4])
    )
    joined = several.join(one)
    assert joined.sequence_lens is not None and len(joined.sequence_lens) == 3
    assert joined.split_sequences([1])[1] == [2] and joined.part(range(1, 2)).split_sequences([0])[1] == [0]


@pytest.mark.parametrize(
    ("lens", "drawn", "message"),
    [
        ([4, 3], [0, 0, 1, 1, 1, 0, 1], "first token of a sequence"),
        ([4, 2], [0, 0, 1, 1, 0, 0, 1], "not as long together"),
        ([7, 0], [0, 0, 1, 1, 0, 0, 1], "have no token"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(lens: list[int], drawn: list[int], message: str) -> None:
    known = {"action_mask": torch.tensor(drawn).bool(), "rollout_log_probs": torch.zeros(sum(drawn))}
    with pytest.raises(ValueError, match=message):
        Rollout.of(
            *(0, [[1, 2]], [[3, 4, 5, 6, 7]]),
            **known,
            sequence_counts=torch.tensor([2]),
            sequence_lens=torch.tensor(lens),
        )


# ---- failures


def test_a_sample_of_an_environment_that_fails_is_left_out(programs: Path) -> None:
    engine = FakeEngine()
    asked = requests(4, fails=False)
    asked[1] = Request(1, 0, Prompt(5, asked[1].prompt.token_ids, {"fails": True}, "go"), 101)
    cfg = AgentConfig(rollout=f"{programs}:some_fail", on_error="leave_out", retries=1)
    agents = AgentRunner(cfg, tokenizer(), (EOS,), is_chat=False)
    try:
        found = play_all(agents, asked, PARAMS, engine.generate)
    finally:
        agents.close()
    assert [bool(sample.left_out) for sample in found] == [False, True, False, False]
    assert "the tool is gone" in found[1].left_out and "attempts: 2" in found[1].left_out
    assert restored(asked[1], json_like(plain(found[1]))).left_out == found[1].left_out


class Parts(SimulatedEngine):
    """Data, engine, rewards and agents of a generator in one object; `failing` samples are left out."""

    def __init__(self, *failing: int) -> None:
        super().__init__(lambda request, params: pytest.fail("the agents generate"))
        self.failing, self.scored = failing, list[int]()

    def prompts_for_step(self, step: int, n: int, seed: int) -> list[Prompt]:
        return [Prompt((step + i) % 3, (3, 4), {}, "p") for i in range(n)]

    async def play(self, request: Request, params: object, generate: object) -> Sample:
        if request.sample_id in self.failing:
            none = np.zeros(0)
            return Sample(request, none, none, "abort", "0", left_out="it fails (begun 2 times)\nTraceback\n\n")
        made = np.array([5, 6]), np.array([-1.0, -1.0])
        return Sample(request, *made, "stop", "0", action_mask=np.array([True, True]))

    def submit(self, sample: Sample) -> None:
        self.scored.append(sample.request.sample_id)

    def collect(self, samples: list[Sample]) -> None:
        assert {sample.request.sample_id for sample in samples} == {*self.scored}


def generator(parts: Any, folder: Path, notes: list[str], **algorithm: Any) -> Generator:
    cfg = RLConfig.model_validate(
        {
            **{"trainer": "rl", "run": {"name": "run"}, "model": {"path": "-"}, "data": {"train": "-"}},
            **{"reward": {"function": "environment"}, "agent": {"rollout": "a.py:b", "on_error": "leave_out"}},
            "batch": {"prompts_per_step": 3, "samples_per_prompt": 2, "samples_per_minibatch": 2},
            "algorithm": {"adv_estimator": "grpo", **algorithm},
        }
    )
    (folder / "rollouts").mkdir(exist_ok=True)
    made = Generator(cfg, folder, parts, parts, notes.append, Model().tokenizer, parts, None, agents=parts)
    made.open_scheduler(SimpleNamespace(most_s=1.0, left_s=lambda since: 1.0))
    return made


def test_a_step_learns_from_what_is_left(tmp_path: Path) -> None:
    notes = list[str]()
    rollout, metrics = generator(Parts(), tmp_path, notes).step(0)
    assert rollout.num_samples == 6 and metrics["agent/left_out"] == 0 and not notes
    rollout, metrics = generator(Parts(3), tmp_path, notes).step(0)
    assert rollout.group.tolist() == [0, 0, 1, 1], "one that is left alone compares with nothing"
    assert rollout.rows is not None and rollout.rows.tolist() == [0, 0, 2, 2]
    assert metrics["agent/left_out"] == 1
    assert notes[0].startswith("1 samples are left out") and notes[0].endswith(
        "left_out.jsonl): it fails (begun 2 times)"
    )
    [row] = read_jsonl(tmp_path / "left_out.jsonl")
    assert row == {"step": 1, "left_out": ["it fails (begun 2 times)\nTraceback\n\n"]}, "the reason is not kept whole"
    alone = {"adv_estimator": "reinforce_plus_plus"}
    assert generator(Parts(3), tmp_path, [], **alone).step(0)[0].num_samples == 5
    with pytest.raises(SamplingError, match="no group of the step is left to learn from .*it fails"):
        generator(Parts(0, 3, 4), tmp_path, []).step(0)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(6, [(0, 2), (2, 4), (4, 6)]), (5, [(0, 1), (1, 3), (3, 5)]), (1, [(0, 1)])],
)
def test_minibatches_are_even_where_samples_are_left_out(samples: int, expected: list[tuple[int, int]]) -> None:
    cfg = SimpleNamespace(batch=BatchConfig(prompts_per_step=3, samples_per_minibatch=2))
    found = RLRun.minibatches(SimpleNamespace(cfg=cfg), SimpleNamespace(num_samples=samples))  # type: ignore[arg-type]
    assert [i for part in found for i in part] == list(range(samples)) and all(map(len, found))
    assert [(part.start, part.stop) for part in found] == expected
