#!/usr/bin/env bash
# A run on Slurm, from a directory that all nodes share: sbatch docs/examples/slurm.sh CONFIG [SECTION.KEY=VALUE ...]
# Ten minutes before the time limit the run stops after a checkpoint, and the job is queued again to go on.
# `scancel --signal=TERM --batch JOB` stops it for good, with a checkpoint too. FLOWTRAIN_VENV: its environment, else .venv.
#SBATCH --job-name=flowtrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

. "${FLOWTRAIN_VENV:-.venv}/bin/activate"

token="$PWD/.ray-token-$SLURM_JOB_ID" code=1 requeue=
end() {
  trap '' TERM USR1
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null || true
  wait || true
  rm -f "$token"
  if [ -n "$requeue" ] && [ "$code" = 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
}
trap end EXIT

# Ray's token, of this job and readable by its user alone. Its directory must be shared by the nodes.
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"

# Ports of this job: with Ray's defaults a second Ray on a node fails, or takes no jobs (docs/running.md).
base=$((20000 + SLURM_JOB_ID % 1000 * 10))
ports=(--dashboard-agent-listen-port $((base + 2)) --min-worker-port 0 --max-worker-port 0)
node=(--block --disable-usage-stats --num-cpus "$SLURM_CPUS_PER_TASK" "${ports[@]}")

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # this script runs there
address=$(hostname --ip-address | cut -d ' ' -f 1)
export RAY_ADDRESS="$address:$base"

await_nodes() { # COUNT: until so many nodes have joined, at most five minutes
  python - "$1" <<'PYTHON'
import sys
import time

import ray

wanted, deadline, have, last = int(sys.argv[1]), time.monotonic() + 300, 0, None
while have < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{have} of {wanted} nodes have joined Ray within five minutes ({last}); their logs are above")
    time.sleep(2)
    try:
        ray.init(address="auto", logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
        have = sum(node["Alive"] for node in ray.nodes())
    except Exception as error:  # the head is not up yet
        last = error
PYTHON
}

ray start --head --node-ip-address "$address" --port "$base" --dashboard-port $((base + 1)) \
  --ray-client-server-port $((base + 3)) --temp-dir "/tmp/ray-$SLURM_JOB_ID" "${node[@]}" &
await_nodes 1
if ((SLURM_JOB_NUM_NODES > 1)); then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes="$others" --ntasks="$others" --exclude="$head" ray start --address "$RAY_ADDRESS" "${node[@]}" &
  await_nodes "$SLURM_JOB_NUM_NODES"
fi
echo "Ray's dashboard: ssh -L 8265:127.0.0.1:$((base + 1)) $head, then http://127.0.0.1:8265"

flowtrain train "$@" --resume &
driver=$!
trap 'kill -TERM "$driver"' TERM
trap 'requeue=1; kill -TERM "$driver"' USR1
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do # a signal ended the wait; the driver writes its checkpoint
  code=0
  wait "$driver" || code=$?
done
exit "$code"
