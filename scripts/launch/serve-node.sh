#!/usr/bin/env bash
# One node of vLLM servers: every such node runs this once. The schedulers' files beside it set
#
#   RECIPE              the recipe
#   SERVERS             a folder on a file system that all nodes share, where servers keep their addresses; its removal ends them
#   COUNT               servers on this node
#   GPUS                GPUs of this node, divided among its servers; 0 on CPUs
#   HOST                address to listen on; 0.0.0.0 (all, and others use this node's name) unless said
#   SERVER_PORT         of the first server, the others have the next ones; 8000 unless said
#   RLGEN_SERVER_TOKEN  of the servers, as the trainers have it
#
# Servers take their settings (max_num_seqs, …) from the recipe's engine section, whose kind is colocated, or server with launch;
# tensor_parallel_size is the number of GPUs of each. Further arguments go to `rlgen serve`. A server that dies is started again.
set -uo pipefail
: "${RECIPE:?}" "${SERVERS:?}" "${COUNT:?}" "${GPUS:?}" "${RLGEN_SERVER_TOKEN:?}"
if ((GPUS % COUNT)); then
    echo "serve-node.sh: $COUNT servers cannot divide $GPUS GPUs evenly" >&2
    exit 2
fi

# Asked to stop, trainers finish their step, and need answers until then. So servers end by the removal of SERVERS alone.
trap '' TERM INT USR1

serve() {
    local number=$1 port=$((${SERVER_PORT:-8000} + $1)) host=${HOST:-0.0.0.0} devices
    shift
    if ((GPUS)); then
        set -- --set "engine.tensor_parallel_size=$((GPUS / COUNT))" "$@"
        devices=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}
        CUDA_VISIBLE_DEVICES=$(cut -d, -f"$((number * (GPUS / COUNT) + 1))-$(((number + 1) * (GPUS / COUNT)))" <<<"$devices")
        export CUDA_VISIBLE_DEVICES
    fi
    while [[ -d $SERVERS ]]; do
        rlgen serve "$RECIPE" --host "$host" --port "$port" --announce "$SERVERS" "$@"
        case $? in
        0) return 0 ;; # SERVERS was removed
        2 | 3 | 4 | 70) return 1 ;; # wrong, and wrong again next time
        esac
        sleep "${AGAIN:-5}"
    done
}

for ((number = 0; number < COUNT; number++)); do
    serve "$number" "$@" &
done
wait
