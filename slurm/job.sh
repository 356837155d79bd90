# shellcheck shell=bash
# The body of a job, the same on every machine: unpacks the Python environment on every node, checks the nodes with `hzero doctor`,
# trains, and has Slurm start the job again if training has saved but not finished. A job script sources it after the environment
# file of its machine.
#
# Arguments: those of `hzero train`. Variables of the script:
#   HZERO_STEP       array: options of srun for the ranks, such as those that bind each of them to its GCD
#   HZERO_RANK       array: what begins the command of every rank; often empty
#   HZERO_ENV        archive (.tar.gz) of a Python environment, or a container (.sif); empty: HZERO_PYTHON or python on every node
#   HZERO_LOCAL      disk of a node, for the archive
#   HZERO_CHECK      0: no check of the nodes before training
#   HZERO_RESTARTS   how often the job may be started again (20)
set -uo pipefail
unset SLURM_EXPORT_ENV # of sbatch --export=NONE: srun would pass no variables on
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
nodes=$SLURM_JOB_NUM_NODES restart=${SLURM_RESTART_COUNT:-0}
say() { echo "hzero: job $SLURM_JOB_ID: $*"; }
fail() {
  say "$2" >&2
  exit "$1"
}

# ---- the run ------------------------------------------------------------------------------------------------------------
# Its folder has the job's name, so that a second job of the same name resumes it. A job that has none of its own has its number.
case $SLURM_JOB_NAME in
hzero) run=$SLURM_SUBMIT_DIR/runs/hzero-$SLURM_JOB_ID ;;
*[!A-Za-z0-9._-]* | .*) fail 2 "--job-name: found $SLURM_JOB_NAME; expected letters, digits, dots, _ and -" ;;
*) run=$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_NAME ;;
esac
# Two jobs would write to one folder.
others=$(squeue --noheader --user="$(id -un)" --name="$SLURM_JOB_NAME" --states=RUNNING --format=%A | grep -vx "$SLURM_JOB_ID")
[ "$SLURM_JOB_NAME" = hzero ] || [ -z "$others" ] ||
  fail 2 "job $others trains in $run; queue jobs of one name with --dependency=singleton"
logs=$run/slurm/$SLURM_JOB_ID-$restart
mkdir -p "$logs" && touch "$logs/began" || exit 1 # checkpoints of this start are newer
# Slurm 22.05 does not say yet when the job ends. The ranks stop in time by it.
if [ -z "${SLURM_JOB_END_TIME:-}" ] && ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) && [ -n "$ends" ]; then
  SLURM_JOB_END_TIME=$(date --date="$ends" +%s 2>/dev/null) && export SLURM_JOB_END_TIME # NONE without a limit
fi
MASTER_ADDR=$(hostname -i)
export MASTER_ADDR=${MASTER_ADDR%% *} # of several addresses the first

# `scancel` sends SIGTERM, of which bash learns when the step has ended: the job is not started again then.
cancelled=
trap 'cancelled=1' TERM
# A step with one task on each node.
each_node() { srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 "$@"; }
# A step with all ranks. Its output is one file per node. When a rank ends, the others have two minutes to say whom they have
# waited for; --kill-on-bad-exit=1 would end them first.
all_ranks() {
  local name=$1
  shift
  srun -N "$nodes" -n $((nodes * SLURM_NTASKS_PER_NODE)) --ntasks-per-node="$SLURM_NTASKS_PER_NODE" "${HZERO_STEP[@]}" \
    --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$logs/$name-%n-%N.log" "${HZERO_RANK[@]}" "$@"
}

# ---- the Python environment ---------------------------------------------------------------------------------------------
python=("${HZERO_PYTHON:-python}")
case ${HZERO_ENV:-} in
"") ;;
*.sif) python=(singularity exec "$HZERO_ENV" python) ;;
*)
  local_env=$HZERO_LOCAL/hzero-$SLURM_JOB_ID
  # A node that has died must not hold up the end.
  # shellcheck disable=SC2317,SC2329
  clean() { timeout -k 5 60 srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 rm -rf "$local_env" "$local_env.lock"; }
  trap clean EXIT
  # -O: what runs from there must not be another user's, on a disk that all may write.
  # shellcheck disable=SC2016
  each_node bash -c 'mkdir -p "$1" && [ -O "$1" ]' _ "$local_env" || fail 1 "cannot make $local_env on every node"
  # A broadcast that fails can leave parts of files on some nodes, which fail in strange ways when they are used.
  sbcast --preserve --force "$HZERO_ENV" "$local_env/env.tar" || fail 1 "sbcast of $HZERO_ENV failed"
  # --overwrite: a job that is started again may find its files there. flock: nodes that are pretended share a disk.
  each_node flock "$local_env.lock" tar --overwrite -xf "$local_env/env.tar" -C "$local_env" ||
    fail 1 "$HZERO_ENV cannot be unpacked on every node"
  export PATH=$local_env/bin:$PATH
  python=("$local_env/bin/python")
  # The archive's scripts hold the path at which it was packed.
  if [ -x "$local_env/bin/conda-unpack" ]; then
    each_node "${python[@]}" "$local_env/bin/conda-unpack" || fail 1 "conda-unpack failed"
  fi
  ;;
esac
[ -z "${MIOPEN_USER_DB_PATH:-}" ] || each_node mkdir -p "$MIOPEN_USER_DB_PATH"

# ---- before training ----------------------------------------------------------------------------------------------------
if [ "${HZERO_CHECK:-1}" != 0 ]; then
  say "checking $nodes nodes"
  # The signal before the time limit would end the check, which then looks like a failure.
  # shellcheck disable=SC2016
  all_ranks doctor bash -c 'trap "" USR1; exec "$@"' _ "${python[@]}" -m hzero doctor
  case $? in
  0) ;;
  1) say "hzero doctor warns; see $logs" ;;
  *) fail 1 "hzero doctor: training cannot work here; see $logs" ;;
  esac
fi

# ---- training -----------------------------------------------------------------------------------------------------------
say "training on $nodes nodes; logs: $logs"
all_ranks train "${python[@]}" -m hzero train "run.dir=$run" resume=auto "$@"
status=$?
again=
case $status in
0 | 2) ;;                                          # finished; input that is refused
75 | 138) status=75 again="stopped before the end" ;; # 138: SIGUSR1 came while Python was starting
*) # A failure after a new checkpoint may be a node's. An error of the software would come back each time.
  [ -z "$(find "$run" -name complete.json -newer "$logs/began" -print -quit)" ] || again="failed with status $status"
  ;;
esac
if [ -n "$again" ] && [ -z "$cancelled" ] && [ "$restart" -lt "${HZERO_RESTARTS:-20}" ]; then
  say "$again; the job is started again"
  # It ends this script, unless the site does not allow it.
  scontrol requeue "$SLURM_JOB_ID" && exit "$status"
fi
case $status in
0) say finished ;;
75) say "saved; the same command resumes the run" ;;
*) fail "$status" "failed with status $status; see $logs" ;;
esac
exit "$status"
