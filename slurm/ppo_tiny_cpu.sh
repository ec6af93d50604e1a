#!/bin/bash
# PPO with a critic, the quickstart's tiny model, TP2 x PP2 x DP2 by gloo on 2 nodes without GPUs: does the cluster work?
# After `make quickstart` in the checkout: sbatch slurm/ppo_tiny_cpu.sh [KEY=VALUE...]
#SBATCH --job-name=ppo_tiny_cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.log
#SBATCH --dependency=singleton     # of jobs with this name one runs, the others wait: submit several for a chain
export CONFIG=${CONFIG:-yaml_configs/quickstart_ppo.yaml}
set -- run.nproc=4 run.name=ppo_tiny_cpu checkpoint.every_steps=20 "$@"
source "${MRL_HOME:-$SLURM_SUBMIT_DIR}/slurm/run.sh"
