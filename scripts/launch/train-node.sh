#!/usr/bin/env bash
# One node of a training on several nodes: every node runs this once. The schedulers' files beside it set
#
#   NODES    how many nodes
#   NODE     which one this is; 0 is the first
#   HEAD     address of the first
#   GPUS     processes on each node, one a GPU
#   RECIPE   the recipe
#   RUN_DIR  the run's folder, on a file system that all nodes share
#   PORT     of the first node, where all meet; 29500 unless said
#
# Further arguments go to `rlgen train`. A run that is there already is gone on with.
#
# torchrun ends with 1 whatever its processes ended with. The first node ends with rlgen's own code instead:
#   0 done; 75 stopped on request, with a good checkpoint: start again; 2 3 4 5 7 70 wrong, and wrong again next time;
#   others (6 8 9, 1): look at the log, another start may help.
set -uo pipefail
: "${NODES:?}" "${NODE:?}" "${HEAD:?}" "${GPUS:?}" "${RECIPE:?}" "${RUN_DIR:?}"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# SIGTERM means: finish the step and save. Without this torchrun kills after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Where nodes have several network cards, name the one between them:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

status="$RUN_DIR/status.json"
before=$(cat "$status" 2>/dev/null)
# No node sees what another writes in this start: the folder is made when all nodes have met.
# A start that failed before it sampled has a status and no provenance: there is nothing to go on with.
resume=()
[[ -e $RUN_DIR/provenance.json ]] && resume=(--resume)

asked=0 torchrun=
stop() { ((asked++)) || [[ -z $torchrun ]] || kill -TERM "$torchrun" 2>/dev/null; }
trap stop TERM INT USR1

# A session of its own: a scheduler may signal a whole process group, and torchrun must hear of it once, from here.
setsid torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "$GPUS" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" \
    -m rlgen train "$RECIPE" --run-dir "$RUN_DIR" "${resume[@]}" "$@" &
torchrun=$!
[[ $asked -eq 0 ]] || kill -TERM "$torchrun" # asked to stop before there was anything to stop

# A signal ends `wait`, not torchrun.
until
    wait "$torchrun"
    code=$?
    ! kill -0 "$torchrun" 2>/dev/null
do :; done

if [[ $code -ne 0 && $NODE -eq 0 && "$(cat "$status" 2>/dev/null)" != "$before" ]]; then
    code=$(sed -n 's/^ *"exit_code": \([0-9][0-9]*\),*$/\1/p' "$status")
fi
exit "${code:-1}"
