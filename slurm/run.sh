# What every job in this folder does after its header, which sources this: one launcher a node, and when the time is up
# save, requeue and go on. Nothing below needs an edit; what may be set in the environment or the header:
#
#   CONFIG              the YAML file of the run; or COMMAND, an array, of what `mrl` is to do instead of training
#   ENGINE_NODES        how many of the job's nodes, the last ones, serve engines (`mrl serve`) for a configuration with
#                       placement.mode: disaggregated, and train nothing
#   VENV                virtual environment with mrl, seen by all nodes (default: .venv of the checkout)
#   CONTAINER_IMAGE     instead of a virtual environment (needs pyxis); CONTAINER_MOUNTS: what it sees
#   LOG_DIR             of the nodes' logs, NAME_JOB_NODE.log (default: logs)
#   MAX_REQUEUES        how often a job may go on by itself (default: 100)
#   PREFLIGHT           no: several nodes start without looking at each other first
#   LOST_S              seconds that a node may need to end after another one has failed, before it counts as lost; more
#                       than the cluster's KillWait (default: 120)
#   NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME, NCCL_DEBUG: as NCCL and gloo know them
#
# Words after the script's name, KEY=VALUE, go to `mrl train`.
set -uo pipefail

phase() { echo "$(date '+%F %T') ${SLURM_JOB_NAME} ${SLURM_JOB_ID}.${SLURM_RESTART_COUNT:-0}: $*"; }
fail() { phase "error: $*"; exit 1; }

cd "${MRL_HOME:-$SLURM_SUBMIT_DIR}" || fail "no directory ${MRL_HOME:-$SLURM_SUBMIT_DIR}"
[[ -v COMMAND || -f ${CONFIG:?the header of the job names no CONFIG} ]] ||
  fail "there is no $CONFIG in $PWD: submit from the checkout, or set MRL_HOME"
EXIT_PREEMPTED=75 # of mrl: saved and left after a signal

# ---- where the nodes meet: the first one's address as Slurm knows it, a port of this job and attempt

head_name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_node=$(scontrol show node -o "$head_name" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
head_node=${head_node:-$head_name}
head=$(getent ahostsv4 "$head_node" | awk 'NR == 1 { print $1 }')
if [[ $head == 127.* && $head_node != 127.* ]] && ((SLURM_JOB_NUM_NODES > 1)); then # of its own /etc/hosts, as Debian's
  other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)
  asked=(srun --overlap --mem=0 --time=1 --nodes=1 --ntasks=1 --cpu-bind=none --nodelist="$other")
  head=$("${asked[@]}" getent ahostsv4 "$head_node" | awk 'NR == 1 { print $1 }')
  [[ $head != 127.* ]] || fail "$head_node is $head on $other too: give nodes their addresses by DNS, /etc/hosts or NodeAddr"
fi
[[ -n $head ]] || fail "the head node $head_name has no IPv4 address"
port=$((20000 + (SLURM_JOB_ID * 13 + ${SLURM_RESTART_COUNT:-0}) % 6000)) # mrl takes its own above these

# ---- environment of the ranks and engines

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
[[ -n ${NCCL_SOCKET_IFNAME:-} ]] || unset NCCL_SOCKET_IFNAME
[[ $head == 127.* ]] && GLOO_SOCKET_IFNAME=lo
# gloo takes whole names alone, NCCL also beginnings, and signs before them
[[ -n ${NCCL_SOCKET_IFNAME:-} && -e /sys/class/net/$NCCL_SOCKET_IFNAME ]] && : "${GLOO_SOCKET_IFNAME:=$NCCL_SOCKET_IFNAME}"
[[ -n ${GLOO_SOCKET_IFNAME:-} ]] && export GLOO_SOCKET_IFNAME

step=(srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --unbuffered)
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
  step+=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD" --container-mounts="$PWD,${CONTAINER_MOUNTS:-$PWD}")
  python=python
else
  python=${VENV:-$PWD/.venv}/bin/python
  [[ -x $python ]] || fail "there is no $python: make the environment (README), or set VENV or CONTAINER_IMAGE"
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# ---- what each node is told

gpus=${SLURM_GPUS_PER_NODE:-} # 8, or h100:8
if [[ -v COMMAND ]]; then
  arguments=("${COMMAND[@]}" "$@")
else
  arguments=(train "$CONFIG" ${gpus:+"run.nproc=${gpus##*:}"} "$@")
  ((${SLURM_RESTART_COUNT:-0} > 0)) && arguments+=(run.existing=move_aside) # what no checkpoint was written in
fi
trainers=$((SLURM_JOB_NUM_NODES - ${ENGINE_NODES:-0}))
((trainers > 0)) || fail "ENGINE_NODES=$ENGINE_NODES of $SLURM_JOB_NUM_NODES nodes leave none for the trainer"
((trainers > 1)) && place='--nodes '$trainers' --node "$SLURM_NODEID" --head "'$head:$port'"'
if [[ -n ${ENGINE_NODES:-} ]]; then # the last ones of the job
  arguments+=("placement.nodes=$ENGINE_NODES")
  serves='((SLURM_NODEID < '$trainers')) || { shift; set -- serve "$@" run.nodes='$trainers' --node $((SLURM_NODEID - '$trainers')) --head '$head'; }'
fi
LOG_DIR=${LOG_DIR:-$PWD/logs}
mkdir -p "$LOG_DIR" || fail "$LOG_DIR cannot be made"
export LOG=$LOG_DIR/${SLURM_JOB_NAME}_$SLURM_JOB_ID

# Slurm would signal every process of a step, engines and helpers too: only `mrl train` knows its ranks. And it would end
# the step, with a code of its own, at the first node that is through with saving: so each writes its code down.
export STATE=$LOG_DIR/.${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0} EXIT_PREEMPTED
node='exec >>"${LOG}_$SLURMD_NODENAME.log" 2>&1
'${serves:-}'
[[ $1 == serve ]] || set -- "$@" '${place:-}'
ended= # 143 where Slurm ends this node, with another one or for good; only a node that is lost writes nothing
trap "ended=143; echo 143 >\"$STATE.code.$SLURM_NODEID\"" TERM
"$0" -m mrl "$@" &
echo $! >"$STATE.pid.$SLURM_NODEID"
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
((code == 128 + 10)) && code=$EXIT_PREEMPTED # of USR1, before Python could listen for it: nothing has begun
code=${ended:-$code}
echo "$code" >"$STATE.code.$SLURM_NODEID"
exit $((code == EXIT_PREEMPTED ? 0 : code))'
run= warned=
warn() {
  warned=yes
  [[ -n $run ]] || return
  phase "told to stop: the ranks save"
  "${step[@]}" --mem=0 bash -c 'kill -USR1 "$(cat "$STATE.pid.$SLURM_NODEID")"' || phase "error: not every node could be told"
}
trap warn USR1
requeue() { # "why": as often as is allowed
  ((${SLURM_RESTART_COUNT:-0} < ${MAX_REQUEUES:-100})) || return
  phase "$1; the job goes on as soon as there is room for it"
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60 # for Slurm to end this script
}

phase "nodes $SLURM_JOB_NODELIST, head $head:$port, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
[[ -n ${CONTAINER_IMAGE:-} ]] && "${step[@]}" true && phase "every node has the container"

# ---- preflight: every node looks at itself, at the others and at the network between them; it ends by itself

if [[ -n ${place:-} && ! -v COMMAND && ${PREFLIGHT:-yes} == yes ]]; then
  names=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$trainers" | paste -sd,)
  look='((SLURM_NODEID < '$trainers')) || exit 0
  exec >>"${LOG}_$SLURMD_NODENAME.log" 2>&1
  COLUMNS=160 "$0" -m mrl "$@" '${place/:$port/:$((port - 10000))}'
  code=$?
  ((code == 0 || code == 143)) || echo "$SLURMD_NODENAME $code" >"$STATE.look.$SLURM_NODEID" # 143: ended with another
  exit $code'
  phase "preflight of $names"
  "${step[@]}" --mem=0 --time="${PREFLIGHT_MINUTES:-10}" --kill-on-bad-exit=1 bash -c "$look" "$python" \
    preflight "${arguments[@]:1}" --names "$names"
  code=$?
  bad=$(ls -tr "$STATE".look.* 2>/dev/null | xargs -r -d '\n' cat | paste -sd,)
  rm -f "$STATE".look.*
  if ((code)); then
    phase "error: preflight has found something wrong on ${bad:-a node that does not end} (with exit code): ${LOG}_NODE.log"
    code=${bad#* } && code=${code%%,*} # of the first one
    exit "${code:-1}"
  fi
fi

# ---- the run

if [[ -n $warned ]]; then
  requeue "told to stop before the run began"
  exit "$EXIT_PREEMPTED"
fi
began=$(date +%s)
phase "starting: mrl ${arguments[*]}; each node writes to ${LOG}_NODE.log"
"${step[@]}" --job-name=run --mem=0 --kill-on-bad-exit=1 bash -c "$node" "$python" "${arguments[@]}" &
run=$!
first_failure() { ls -tr "$STATE".code.* 2>/dev/null | xargs -r -d '\n' cat | grep -v '^0$' | head -n 1; }
without_code() { # nodes that began and have not said how they ended
  local here k
  here=$(printf '%s\n' "$STATE".*)
  for ((k = 0; k < SLURM_JOB_NUM_NODES; k++)); do
    grep -qxF "$STATE.pid.$k" <<<"$here" && ! grep -qxF "$STATE.code.$k" <<<"$here" && echo "$k"
  done | tr '\n' ' '
}
was_away() { # whether Slurm has no word of node k of the job, or it began anew after the run did
  local node
  node=$(scontrol show node -o "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$(($1 + 1))p")") || return 0
  [[ $node =~ State=[A-Z+_]*(DOWN|NOT_RESPONDING|\*) ]] ||
    (($(date -d "$(grep -o 'SlurmdStartTime=[^ ]*' <<<"$node" | cut -d= -f2)" +%s) >= began))
}
end_run() { { kill -KILL "$run"; wait "$run"; } 2>/dev/null; }
waited=0
while kill -0 "$run" 2>/dev/null; do
  sleep 1 & wait $! # a trap waits for what is in the foreground
  failed=$(first_failure)
  [[ -z $failed || $failed == "$EXIT_PREEMPTED" ]] || ((waited++))
  if ((waited && waited % 5 == 0)) && steps=$(squeue --noheader --steps -j "$SLURM_JOB_ID" -o '%i %j'); then
    number=$(awk '$2 == "run" { print $1 }' <<<"$steps")
    [[ -n $number ]] || end_run # srun alone has not noticed
    # a node that was about to begin has missed srun's signal
    [[ -z $number || -z $(without_code) ]] || scancel --quiet --signal=TERM "$number" 2>/dev/null
  fi
  ((waited <= ${LOST_S:-120})) || end_run
done
wait "$run" 2>/dev/null
code=$?
lost=$(for k in $(without_code); do ((waited <= ${LOST_S:-120})) && ! was_away "$k" || echo "$k"; done | tr '\n' ' ')
failed=$(first_failure)
code=${failed:-$code}
rm -f "$STATE".*

if [[ -n $lost ]]; then
  requeue "node ${lost}of $SLURM_JOB_NODELIST did not end with the others and counts as lost"
elif ((code == EXIT_PREEMPTED)); then
  requeue "saved and left"
fi
phase "ended with exit code $code"
exit "$code"
