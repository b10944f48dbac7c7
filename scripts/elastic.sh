#!/usr/bin/env bash
# One node of an elastic run: start it on every machine, at any time; the run continues on the nodes that are there.
#   HEAD=node1:29400 ./scripts/elastic.sh -epochs 90 ...    (arguments of train.py)
#
#   HEAD         host:port where the nodes meet; the first machine, which must stay   (this machine:29400)
#   NODES        how many, at least:at most                                          (1:4)
#   PER_NODE     processes a node, or gpu            (-cpu's or -gpus's, else gpu where there is one, else 1)
#   RUN_ID       what all nodes of one run share; with -reset, one that no start had before   (baton)
#   RESTARTS     how often lost processes are replaced                               (100)
#   RENDEZVOUS   c10d, or etcd-v2 with HEAD the etcd server                          (c10d)
# In a pod, torchrun's own PET_ variables, which Kubeflow's operators set, stand in for those that are not given.
set -eu
cd "$(dirname "$0")/.."
[ -d .venv ] && . .venv/bin/activate

head="${HEAD:-${PET_RDZV_ENDPOINT:-${PET_MASTER_ADDR:-$(hostname)}:${PET_MASTER_PORT:-29400}}}"
rendezvous="${RENDEZVOUS:-${PET_RDZV_BACKEND:-c10d}}"
facts="$(python scripts/agent.py elastic "$head" "$@")" || exit # is_host, processes, this address, ...
[ -n "$facts" ] || exit 0 # -h
eval "$facts"
per_node="${PER_NODE:-${PET_NPROC_PER_NODE:-$processes}}"
: "${per_node:=$(python -c 'import torch; print("gpu" if torch.cuda.device_count() else 1)')}"
conf="last_call_timeout=5,join_timeout=600"
if [ "$rendezvous" = c10d ]; then
    # torchrun guesses whether it runs on the head, and fails if a host has several names (pytorch issue 73656).
    [ -z "${PET_NODE_RANK:-}" ] || is_host=$((PET_NODE_RANK == 0))
    is_host="${IS_HOST:-$is_host}"
    conf="$conf,keep_alive_interval=2,keep_alive_max_attempt=3,is_host=$is_host"
fi

# Without this a node that joins later never gets in, and both die after a minute (seen in torch 2.13 and 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PET_NNODES="${NODES:-${PET_NNODES:-1:4}}" # also for train.py, which continues when another node leaves
exec torchrun --nproc_per_node="$per_node" \
    --max-restarts="${RESTARTS:-${PET_MAX_RESTARTS:-100}}" --monitor-interval=1 \
    --rdzv_id="${RUN_ID:-${PET_RDZV_ID:-baton}}" --rdzv_backend="$rendezvous" --rdzv_endpoint="$head" \
    --rdzv-conf="$conf" --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 train.py "$@"
