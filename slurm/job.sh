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
#   HZERO_WAIT       seconds that the other ranks have once the first has ended
#   HZERO_RESTARTS   how often the job may be started again; 0 in a chain, where the next job goes on
#   HZERO_CHECK      array: options of `hzero bench links` before training; empty for none
#   HZERO_TOPOLOGY   how these options describe the machine: auto, or GPUs and GCDs such as 4x2
set -uo pipefail
unset SLURM_EXPORT_ENV # of sbatch --export=NONE: srun would pass no variables on
umask 077 # as `hzero train` has it
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
nodes=$SLURM_JOB_NUM_NODES
restart=${SLURM_RESTART_COUNT:-0}
logs=$HZERO_JOB/slurm/$SLURM_JOB_ID-$restart
mkdir -p "$logs" || exit 1
began=$(date +%s)
# Slurm's names of the nodes, in the order of SLURM_NODEID.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=$(hostname -i)
export HZERO_JOB MASTER_ADDR=${MASTER_ADDR%% *} # of several addresses the first

# `scancel` and the time limit send SIGTERM, of which bash learns when the step has ended: nothing is started again then.
result="the job ended" cancelled=
trap 'cancelled="cancelled; "' TERM
history=$HZERO_JOB/slurm/jobs.jsonl
# Writes the line of history.
# shellcheck disable=SC2317,SC2329
leave() {
  printf '{"job": %s, "restart": %s, "began": %s, "ended": %s, "nodes": %s, "status": %s, "result": "%s"}\n' "$SLURM_JOB_ID" \
    "$restart" "$began" "$(date +%s)" "$nodes" "$1" "$cancelled$result" >>"$history"
}
trap 'leave $?' EXIT
say() { echo "hzero: job $SLURM_JOB_ID: $*"; }
fail() {
  result=$1
  say "$1" >&2
  exit "${2:-1}"
}
waiting() { squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --states=PENDING --format=%i; }
stop_chain() { waiting | xargs --no-run-if-empty scancel; }

# A step with one task on each node.
each_node() { srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 "$@"; }
# A step with all ranks. Its output is one file per node. A rank that ends gives the others HZERO_WAIT seconds, in which
# they say whom they have waited for; --kill-on-bad-exit=1 would end them first.
all_ranks() {
  local name=$1
  shift
  srun -N "$nodes" -n $((nodes * HZERO_RANKS)) --ntasks-per-node="$HZERO_RANKS" "${HZERO_STEP[@]}" --kill-on-bad-exit=0 \
    --wait="$HZERO_WAIT" --open-mode=append --output="$logs/$name-%n-%N.log" "${HZERO_RANK[@]}" "$@"
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
  local job before times
  times=$(grep -c "^{\"job\": $SLURM_JOB_ID,.*nodes excluded" "$history")
  [ "${times:-0}" -lt 5 ] || fail "nodes have been excluded 5 times, and now $1 would be; see $logs"
  result="nodes excluded: $1" && say "$result"
  leave 75
  trap - EXIT
  trap '' TERM # of the job's end, which comes with the next line; there are KillWait seconds (30 by default) for the rest
  scontrol requeuehold "$SLURM_JOB_ID" || fail "the job cannot be started again: $result"
  for job in "$SLURM_JOB_ID" $(waiting); do
    before=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p' | sed 's/(null)//')
    scontrol update JobId="$job" ExcNodeList="${before:+$before,}$1" || say "job $job keeps the nodes $1"
  done
  scontrol release "$SLURM_JOB_ID"
  exit 75
}
# Prints the nodes to exclude, with commas, from the output of a check.
bad_nodes() { "${python[@]}" -m hzero.slurm.preflight "$logs" "$1" "$HZERO_RANKS" "${hosts[@]}"; }

# How `hzero bench links` is told of $1 nodes.
machine_of() { if [ "$HZERO_TOPOLOGY" = auto ]; then echo auto; else echo "$1x$HZERO_TOPOLOGY"; fi; }

if [ "${#HZERO_CHECK[@]}" -gt 0 ]; then
  say "checking $nodes nodes"
  # Status 1 is a warning: works, but slower than the machine could. Its output tells.
  all_ranks doctor "${python[@]}" -m hzero doctor
  doctor=$?
  [ "$doctor" -le 1 ] || say "hzero doctor: status $doctor, see $logs"
  # Every node alone, all at once: whoever fails here is to blame for itself.
  # shellcheck disable=SC2016
  all_ranks alone bash -c 'out=$1 ranks=$2; shift 2
    export RANK=$SLURM_LOCALID WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$((MASTER_PORT + 1 + SLURM_NODEID))
    # These ranks are a world of their own, whatever Slurm and the PMI of a Cray say.
    unset SLURM_STEP_ID SLURM_STEPID PMI_RANK PMI_SIZE PMIX_RANK PALS_RANKID
    exec "$@" --out "$out-$SLURM_NODEID.json"' _ "$logs/alone" "$HZERO_RANKS" \
    env NCCL_NET=Socket "${python[@]}" -m hzero bench links --timeout 60 --topology "$(machine_of 1)" "${HZERO_CHECK[@]}"
  bad=$(bad_nodes alone) || fail "the check of the nodes could not be read, see $logs"
  [ -z "$bad" ] || exclude "$bad"
  if [ "$nodes" -gt 1 ]; then
    all_ranks links "${python[@]}" -m hzero bench links --timeout 60 --topology "$(machine_of "$nodes")" --out "$logs/links.json" \
      "${HZERO_CHECK[@]}"
    bad=$(bad_nodes links) || fail "links between nodes failed, and no node is named; see $logs"
    [ -z "$bad" ] || exclude "$bad"
  fi
  [ "$doctor" -le 1 ] || fail "hzero doctor: training cannot work here; see $logs"
fi

# ---- training ----------------------------------------------------------------------------------------------------------
say "training on $nodes nodes; logs: $logs"
all_ranks train "${python[@]}" -m hzero train "$@"
status=$?
if [ "$status" -eq 0 ]; then
  result=finished
  stop_chain # the jobs that would go on have nothing to do
elif [ "$status" -eq 2 ]; then
  result="the input was refused"
  stop_chain # and would be again
elif [ "$status" -eq 75 ]; then
  result="saved, to go on"
else
  result="failed with status $status"
fi
[ -z "${local_env:-}" ] || each_node rm -rf "$local_env" "$local_env.lock"
if [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && [ -z "$cancelled" ] && [ "$restart" -lt "$HZERO_RESTARTS" ]; then
  say "$result; the job is started again"
  result="$result; started again"
  leave "$status"
  trap - EXIT
  # It ends this script, unless the site does not allow it.
  scontrol requeue "$SLURM_JOB_ID" || say "Slurm does not start it again: submit it again, or as a chain" >&2
else
  say "$result"
fi
exit "$status"
