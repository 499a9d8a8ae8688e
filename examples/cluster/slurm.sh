#!/bin/bash
# Trains on the machines of a SLURM job: sbatch slurm.sh my_env:MyEnv
#
# Ray runs on all machines and the training on the first, whose death ends the job. SLURM sends SIGTERM
# five minutes before the time is over: the run is saved, and the job is queued again and goes on.
#SBATCH --job-name=sebulba
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
environment=${1:?the id of an environment, such as my_env:MyEnv}
per_node=${INFERENCERS_PER_NODE:-14}
if [ "$SLURM_NNODES" -lt 2 ]; then
  echo "one machine trains and the others have the Inferencers: ask for --nodes=2 or more; on one" \
    "machine use sebulba train with --cluster.address processes" >&2
  exit 2
fi
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs of others may be on the same machine

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
export RAY_TMPDIR=${SLURM_TMPDIR:-/tmp}
# Others on these machines do not get into this cluster.
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# The first machine has room for the updates, and no Inferencers but those that are asked for there.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --port="$port" --num-cpus=0 --include-dashboard=false --block &
srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
  bash -c "until ray health-check --address $head:$port; do sleep 2; done 2>/dev/null
           ray start --address=$head:$port --num-cpus=$per_node --block" &

tries=0
until ray health-check --address "$head:$port" 2>/dev/null; do
  if [ $((tries += 1)) -gt 60 ]; then
    echo "Ray did not start on $head, or something else has its port $port" >&2
    exit 1
  fi
  sleep 2
done
sebulba train impala --env.id "$environment" --name "slurm-$SLURM_JOB_ID" --resume \
  --num-inferencers-per-device $((per_node * (SLURM_NNODES - 1))) \
  --cluster.address "$head:$port" --cluster.nodes "$SLURM_NNODES" \
  --cluster.inferencers-per-node "$per_node" \
  --faults.on-env-failure restart &
training=$!
trap 'kill -TERM $training' TERM
wait $training
code=$?
if [ $code -gt 128 ] && kill -0 $training 2>/dev/null; then # the trap ended the first wait
  wait $training
  code=$?
fi
if [ $code -eq 143 ]; then # saved, and the time is over
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
