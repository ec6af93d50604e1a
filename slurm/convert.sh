#!/bin/bash
# Between Hugging Face and Megatron directories, on one node without GPUs.
# sbatch slurm/convert.sh hf-to-megatron SRC DST     (or megatron-to-hf; `mrl convert --help` has more)
# With --skip-logits at the end tensors alone are compared, bit by bit, which needs little memory.
#SBATCH --job-name=convert
#SBATCH --account=ACCOUNT          # edit
#SBATCH --partition=PARTITION      # edit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=0                    # the node's: logits are compared in float32, 5 bytes a weight (of a 70B 353 GB)
#SBATCH --time=04:00:00            # edit
#SBATCH --output=%x_%j.log
export VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv} # edit, or CONTAINER_IMAGE=...
COMMAND=(convert --workers "$SLURM_CPUS_PER_TASK" --verify)
source "${MRL_HOME:-$SLURM_SUBMIT_DIR}/slurm/run.sh"
