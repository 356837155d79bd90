# shellcheck shell=bash
# The body of a training job, the same on every machine: checks the nodes with `hzero doctor`, trains, and has Slurm start the job
# again if training has saved but not finished. A job script sources it after the environment file of its machine.
#
# Arguments: those of `hzero train`. Variables of the script, which pass as in `sbatch --export=HZERO_RESTARTS=5 ...`:
#   HZERO_CHECK      0: no check of keys and nodes before training
#   HZERO_RESTARTS   how often the job may be started again (0)
# shellcheck source=slurm/ranks.sh
source "$SLURM_SUBMIT_DIR/slurm/ranks.sh"
restart=${SLURM_RESTART_COUNT:-0} restarts=${HZERO_RESTARTS:-0}
# Slurm starts a job again whose node has died, unless the job forbids it.
[ "$restart" -lt "$restarts" ] || scontrol update "JobId=$SLURM_JOB_ID" Requeue=0

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
# `scancel` sends SIGTERM, of which bash learns when the step has ended: the job is not started again then. Ranks that save at once
# may end before the signal comes here; the job is then no longer running for Slurm.
cancelled=
trap 'cancelled="ended by scancel or the time limit"' TERM
# A step with all ranks, whose output is one file per node.
all_ranks() {
  local name=$1
  shift
  "${ranks[@]}" --open-mode=append --output="$logs/$name-%n-%N.log" "${HZERO_RANK[@]}" "$@"
}

prepare_nodes

# ---- before training ----------------------------------------------------------------------------------------------------
if [ "${HZERO_CHECK:-1}" != 0 ]; then
  # A misspelt key, or a data.path that does not exist, is found here in seconds, before all nodes start.
  refused=$(timeout 60 "${python[@]}" -c 'import sys; from hzero.tools.data.token_files import files_of; from hzero.tools.experiment import compose
from hzero.files import expanded; from hzero.errors import ConfigError
try:
    path = compose(sys.argv[1:])["data"]["path"]
    if path and not expanded(path).exists(): files_of(path)
except ConfigError as error: print("hzero: error:", error)' "launcher.world_size=$((nodes * SLURM_NTASKS_PER_NODE))" "$@" 2>/dev/null |
    grep -m1 '^hzero: error: ')
  [ -z "$refused" ] || fail 2 "$refused"
  say "checking $nodes nodes"
  # The signal before the time limit would end the check, which then looks like a failure.
  # shellcheck disable=SC2016
  all_ranks doctor bash -c 'trap "" USR1; exec "$@"' _ "${python[@]}" -m hzero doctor
  case $? in
  0) ;;
  1) say "hzero doctor warns; see $logs" ;;
  *)
    [ -z "$cancelled" ] || fail 1 "$cancelled; see $logs"
    fail 1 "hzero doctor: training cannot work here; see $logs"
    ;;
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
[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ] || cancelled="ended by scancel or the time limit"
if [ -n "$again" ] && [ -z "$cancelled" ] && [ "$restart" -lt "$restarts" ]; then
  say "$again; the job is started again"
  # It ends this script, unless the site does not allow it.
  scontrol requeue "$SLURM_JOB_ID" && exit "$status"
fi
case $status in
0) say finished ;;
75) say "saved; the same command resumes the run" ;;
*)
  [ -z "$cancelled" ] || fail "$status" "$cancelled; see $logs"
  # The refused input, or known faults and their remedies.
  if [ "$status" = 2 ]; then grep -hm1 'hzero: error: ' "$logs"/train-0-*.log; else
    timeout 60 "${python[@]}" -m hzero doctor --log "$logs"/*.log
  fi
  fail "$status" "failed with status $status; see $logs"
  ;;
esac
exit "$status"
