# shellcheck shell=bash
# The body of a job, the same on every machine: broadcasts the Python environment, checks the nodes, trains, and says what
# follows. A job script sources it behind its machine's environment file, or has its text in it (`hzero slurm render`).
#
# Arguments: those of `hzero train`. Variables of the script:
#   HZERO_JOB        folder of the run, on the shared file system: checkpoints, logs, history
#   HZERO_STEP       array: options of srun for the ranks, such as those that bind each to its GCD
#   HZERO_RANK       array: what begins the command of every rank; often empty
#   HZERO_ENV        archive (.tar.gz) of a Python environment, or a container (.sif); empty: HZERO_PYTHON on every node
#   HZERO_LOCAL      disk of a node, for the archive
#   HZERO_RANKS      ranks per node
#   HZERO_WAIT       seconds that the other ranks of the training have once the first has ended
#   HZERO_RESTARTS   how often the job may be started again; 0 in a chain, where the next job goes on
#   HZERO_CHECK      array: options of `hzero bench links` before training; empty for none
#   HZERO_TOPOLOGY   how these options describe the machine: auto, or GPUs and GCDs such as 4x2
#   HZERO_TRANSPORT  what carries the hops: torch, or mpi, for which a machine's environment has variables of its own
set -uo pipefail
unset SLURM_EXPORT_ENV # of sbatch --export=NONE: srun would pass no variables on
umask 077 # as `hzero train` has it
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
nodes=$SLURM_JOB_NUM_NODES
restart=${SLURM_RESTART_COUNT:-0}
case $SLURM_JOB_NAME in
*[!A-Za-z0-9._-]*) # squeue reads a list at a comma
  echo "hzero: the job's name $SLURM_JOB_NAME may have letters, digits, dots, _ and - only" >&2
  exit 2
  ;;
esac
logs=$HZERO_JOB/slurm/$SLURM_JOB_ID-$restart
mkdir -p "$logs" || exit 1
: >"$logs/began" # checkpoints of this start are newer
began=$(date +%s)
# Slurm 22.05 does not say yet when the job ends. The ranks stop in time by it.
if [ -z "${SLURM_JOB_END_TIME:-}" ] && ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) && [ -n "$ends" ]; then
  SLURM_JOB_END_TIME=$(date --date="$ends" +%s 2>/dev/null) && export SLURM_JOB_END_TIME # NONE without a limit
fi
# Slurm's names of the nodes, in the order of SLURM_NODEID.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(hostname -i)
export HZERO_JOB MASTER_ADDR=${MASTER_ADDR%% *} # of several addresses the first

# `scancel` and the time limit send SIGTERM, of which bash learns when the step has ended: nothing is started again then.
result="the job ended" cancelled=
trap 'cancelled="cancelled; "' TERM
# `hzero slurm cancel` makes this file, and sends the ranks the signal that comes before the time limit.
stop=$HZERO_JOB/slurm/stop-$SLURM_JOB_ID
history=$HZERO_JOB/slurm/jobs.jsonl
# Of a job that `hzero slurm submit` has not sent.
grep -qs "^{\"job\": $SLURM_JOB_ID, " "$history" ||
  printf '{"job": %s, "submitted": "%s", "name": "%s", "nodes": %s}\n' "$SLURM_JOB_ID" "$(date --iso-8601=seconds)" \
    "$SLURM_JOB_NAME" "$nodes" >>"$history"
# Writes the line of history.
# shellcheck disable=SC2317,SC2329
leave() {
  printf '{"job": %s, "restart": %s, "began": %s, "ended": %s, "nodes": %s, "status": %s, "result": "%s"}\n' "$SLURM_JOB_ID" \
    "$restart" "$began" "$(date +%s)" "$nodes" "$1" "$cancelled${result//[\"\\]/_}" >>"$history"
}
# Takes the unpacked environment away. A node that has died must not hold up the end.
# shellcheck disable=SC2317,SC2329
clean() {
  [ -z "${local_env:-}" ] ||
    timeout -k 5 60 srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 rm -rf "$local_env" "$local_env.lock"
}
trap 'leave $?; clean' EXIT
say() { echo "hzero: job $SLURM_JOB_ID: $*"; }
# Jobs of the run that wait, by their numbers in the history: a job of another run may have the same name.
waiting() {
  local numbers
  numbers=$(sed -n 's/^{"job": \([0-9]*\), "submitted".*/\1/p' "$history" | sort -u | paste -sd, -)
  squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --jobs="$numbers" --states=PENDING --format=%i
}
stop_chain() { waiting | xargs --no-run-if-empty scancel; }

# Whether another start may help after a status. One failure before any new checkpoint may be a node's, a second is not.
may_help() {
  [ "$1" -ne 0 ] && [ "$1" -ne 2 ] || return 1
  [ "$1" -ne 75 ] || return 0
  [ -z "$(find "$HZERO_JOB/checkpoints" -name complete.json -newer "$logs/began" -print -quit 2>/dev/null)" ] || return 0
  result="$result, no new checkpoint"
  ! tail -n 1 "$history" | grep -q "no new checkpoint"
}
# Ends the job with a status and a result, and starts it again where that may help.
end() {
  local status=$1
  result=$2
  [ ! -e "$stop" ] || cancelled="cancelled; "
  if ! may_help "$status"; then
    stop_chain # the jobs that would go on have nothing to do, or would fail as this one
  elif [ -z "$cancelled" ] && [ "$restart" -lt "$HZERO_RESTARTS" ]; then
    say "$result; the job is started again"
    local without=$result
    result="$result; started again"
    leave "$status"
    clean
    # It ends this script, unless the site does not allow it.
    trap - EXIT
    scontrol requeue "$SLURM_JOB_ID" && exit "$status"
    result="$without; Slurm does not start it again" && leave "$status"
  fi
  say "$result"
  exit "$status"
}
fail() { end 1 "$1"; }
# Ends a job that is to stop.
go_on() { [ ! -e "$stop" ] || end 75 "ended before training"; }

# A step with one task on each node.
each_node() { srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 "$@"; }
# A step with all ranks. Its output is one file per node. A rank that ends gives the others some seconds, in which they say
# whom they have waited for; --kill-on-bad-exit=1 would end them first. Checks wait for 60 s at most.
wait_s=120
all_ranks() {
  local name=$1
  shift
  srun -N "$nodes" -n $((nodes * HZERO_RANKS)) --ntasks-per-node="$HZERO_RANKS" "${HZERO_STEP[@]}" --kill-on-bad-exit=0 \
    --wait="$wait_s" --open-mode=append --output="$logs/$name-%n-%N.log" "${HZERO_RANK[@]}" "$@"
}

# ---- the Python environment --------------------------------------------------------------------------------------------
python=("${HZERO_PYTHON:-python}")
case ${HZERO_ENV:-} in
"") ;;
*.sif) python=(singularity exec "$HZERO_ENV" python) ;;
*)
  local_env=$HZERO_LOCAL/hzero-$SLURM_JOB_ID
  # -O: what runs from there must not be another user's, where the disk is one that all may write.
  # shellcheck disable=SC2016
  each_node bash -c 'mkdir -p "$1" && [ -O "$1" ]' _ "$local_env" || fail "cannot make $local_env on every node"
  # A broadcast that fails can leave parts of files on some nodes, which fail in strange ways when they are used.
  sbcast --preserve --force "$HZERO_ENV" "$local_env/env.tar" || fail "sbcast of $HZERO_ENV failed"
  # --overwrite: a job that is started again may find its files there. flock: nodes that are pretended share a disk.
  each_node flock "$local_env.lock" tar --overwrite -xf "$local_env/env.tar" -C "$local_env" ||
    fail "$HZERO_ENV cannot be unpacked on every node"
  export PATH=$local_env/bin:$PATH
  python=("$local_env/bin/python")
  # The archive's scripts hold the path at which it was packed.
  if [ -x "$local_env/bin/conda-unpack" ]; then
    each_node "${python[@]}" "$local_env/bin/conda-unpack" || fail "conda-unpack failed"
  fi
  ;;
esac
[ -z "${MIOPEN_USER_DB_PATH:-}" ] || each_node mkdir -p "$MIOPEN_USER_DB_PATH"

# ---- before training: ranks, devices and links, through torch itself ---------------------------------------------------
# Excludes nodes and starts the job again. Slurm takes the list of a job that waits only, so the job is held meanwhile.
exclude() {
  local list others times
  go_on
  times=$(grep -c "^{\"job\": $SLURM_JOB_ID,.*nodes excluded" "$history")
  if [ "$times" -ge 5 ]; then
    result="nodes have been excluded 5 times, and now $1 would be" && say "$result; see $logs" >&2
    exit 1
  fi
  result="nodes excluded: $1" && say "$result"
  list=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p' | sed 's/(null)//')
  list=${list:+$list,}$1
  others=$(waiting | paste -sd, -)
  leave 75
  clean
  trap - EXIT
  trap '' TERM # of the job's end, which comes with the next line; there are KillWait seconds (30 by default) for the rest
  if ! scontrol requeuehold "$SLURM_JOB_ID"; then
    result="$result; Slurm does not start the job again" && leave 1 && say "$result" >&2
    exit 1
  fi
  scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$list" || say "job $SLURM_JOB_ID keeps the nodes $1"
  # At once: a job that stays held would hold up the others of its run.
  scontrol release "$SLURM_JOB_ID"
  [ -z "$others" ] || scontrol update JobId="$others" ExcNodeList="$list" || say "jobs $others may keep the nodes $1"
  exit 75
}
# Prints the nodes to exclude, with commas, from the output of a check.
bad_nodes() { "${python[@]}" -m hzero.slurm.preflight "$logs" "$1" "$HZERO_RANKS" "${hosts[@]}"; }

# How `hzero bench links` is told of $1 nodes.
machine_of() { if [ "$HZERO_TOPOLOGY" = auto ]; then echo auto; else echo "$1x$HZERO_TOPOLOGY"; fi; }

if [ "${#HZERO_CHECK[@]}" -gt 0 ]; then
  say "checking $nodes nodes"
  # The signal before the time limit would end a check, and its nodes would look bad. Training knows when the job ends.
  # shellcheck disable=SC2016
  unmoved=(bash -c 'trap "" USR1; exec "$@"' _)
  # Status 1 is a warning: works, but slower than the machine could. Its output tells.
  all_ranks doctor "${unmoved[@]}" "${python[@]}" -m hzero doctor
  doctor=$?
  [ "$doctor" -le 1 ] || say "hzero doctor: status $doctor, see $logs"
  # Every node alone, all at once: whoever fails here is to blame for itself.
  # shellcheck disable=SC2016
  all_ranks alone "${unmoved[@]}" bash -c 'out=$1 ranks=$2; shift 2
    export RANK=$SLURM_LOCALID WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$((MASTER_PORT + 1 + SLURM_NODEID))
    # These ranks are a world of their own, whatever Slurm and the PMI of a Cray say.
    unset SLURM_STEP_ID SLURM_STEPID PMI_RANK PMI_SIZE PMIX_RANK PALS_RANKID
    exec "$@" --out "$out-$SLURM_NODEID.json"' _ "$logs/alone" "$HZERO_RANKS" \
    env NCCL_NET=Socket "${python[@]}" -m hzero bench links --timeout 60 --topology "$(machine_of 1)" "${HZERO_CHECK[@]}"
  bad=$(bad_nodes alone) || fail "most nodes fail alone, which is no node's fault; see $logs"
  # A single node cannot be compared with others.
  [ "$nodes" -gt 1 ] || [ "$doctor" -le 1 ] || fail "hzero doctor: training cannot work here; see $logs"
  [ -z "$bad" ] || exclude "$bad"
  if [ "$nodes" -gt 1 ]; then
    all_ranks links "${unmoved[@]}" "${python[@]}" -m hzero bench links --timeout 60 --topology "$(machine_of "$nodes")" \
      --out "$logs/links.json" "${HZERO_CHECK[@]}"
    bad=$(bad_nodes links) || fail "links between nodes failed, and no node is to blame; see $logs"
    [ -z "$bad" ] || exclude "$bad"
  fi
  [ "$doctor" -le 1 ] || fail "hzero doctor: training cannot work here; see $logs"
fi

# ---- training ----------------------------------------------------------------------------------------------------------
go_on
wait_s=$HZERO_WAIT
say "training on $nodes nodes; logs: $logs"
all_ranks train "${python[@]}" -m hzero train "$@"
status=$?
case $status in
0) end 0 finished ;;
2) end 2 "the input was refused" ;;
75) end 75 "saved, to go on" ;;
# Killed by USR1, the signal before the time limit: it came while ranks were still starting.
138) end 75 "told to stop before it trained" ;;
*) end "$status" "failed with status $status" ;;
esac
