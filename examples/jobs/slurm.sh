#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --time=24:00:00
#SBATCH --signal=B:USR1@120 --requeue --open-mode=append
# Two minutes before the time limit, Slurm sends SIGUSR1 to this script.
export SNAPSHOT_DEADLINE=100s  # torchrun kills its ranks --shutdown-timeout after it heard of the signal

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_PER_NODE:-8}" \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 20000))" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=110 \
    examples/complete_training.py "$RUN" &
job=$!
trap 'stopped=yes; kill -USR1 "$job"' USR1  # srun forwards it to torchrun, and that to the ranks

wait "$job"
status=$?
if [ -n "$stopped" ]; then
    wait "$job"  # the first one ended with the signal
    scontrol requeue "$SLURM_JOB_ID"  # the next start goes on from what was saved
    exit 0
fi
exit "$status"
