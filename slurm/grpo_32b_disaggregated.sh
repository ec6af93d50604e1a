#!/bin/bash
# GRPO, Qwen 32B, trained on 2 nodes of 8 GPUs, with engines on 2 others.
# sbatch slurm/grpo_32b_disaggregated.sh [KEY=VALUE...], from the checkout. To edit: the five lines below that end in "edit".
#SBATCH --job-name=grpo_32b_disaggregated
#SBATCH --account=ACCOUNT          # edit
#SBATCH --partition=PARTITION      # edit
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00            # edit
#SBATCH --signal=B:USR1@900        # seconds before the end: resilience.save_deadline_s and a minute more
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
#SBATCH --dependency=singleton     # of jobs with this name one runs, the others wait: submit several for a chain
export ENGINE_NODES=${ENGINE_NODES:-2} # of the nodes above; the others train
export CONFIG=${CONFIG:-yaml_configs/grpo_qwen32b_disaggregated.yaml}
export VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv} # edit, or CONTAINER_IMAGE=...
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-} # edit: the network between the nodes, such as ib0 or bond0
source "${MRL_HOME:-$SLURM_SUBMIT_DIR}/slurm/run.sh"
