#!/bin/bash
# A titanlite run under SLURM: sbatch docs/slurm.sh configs/tp2_fsdp2.toml --training.steps=10000
#
# Three minutes before its time is up SLURM sends the ranks SIGTERM. They finish the step and save,
# and the job is queued again: the same command then goes on from that checkpoint. dump_folder has
# to be on a file system that all nodes see.
#SBATCH --job-name=titanlite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

config=$1
shift
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# One agent a node. Where a rank dies, all are started again, from the newest checkpoint.
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29400" \
    --rdzv-id "$SLURM_JOB_ID" \
    train.py --job.config_file="$config" --checkpoint.enable=true "$@"
status=$?

# An agent that was asked to stop does not exit with 0; a run that failed does not wait for the end.
if [ $status -ne 0 ] && [ "$(date +%s)" -ge $((SLURM_JOB_END_TIME - 180)) ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
