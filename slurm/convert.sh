#!/bin/bash
# Between Hugging Face and Megatron directories, on one node without GPUs.
# sbatch slurm/convert.sh hf-to-megatron SRC DST     (or megatron-to-hf; `mrl convert --help` has more)
#SBATCH --job-name=convert
#SBATCH --account=ACCOUNT          # edit
#SBATCH --partition=PARTITION      # edit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=04:00:00            # edit
#SBATCH --output=%x_%j.log
export VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv} # edit, or CONTAINER_IMAGE=...
COMMAND=(convert --workers "$SLURM_CPUS_PER_TASK" --verify)
source "${MRL_HOME:-$SLURM_SUBMIT_DIR}/slurm/run.sh"
