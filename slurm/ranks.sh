# shellcheck shell=bash
# The beginning of every job: what starts steps, and the Python environment on every node. job.sh and first_run.sbatch source it
# after the environment file of the machine, which sets:
#   HZERO_STEP       array: options of srun for the ranks, such as those that bind each of them to its GCD
#   HZERO_RANK       array: what begins the command of every rank; often empty
#   HZERO_ENV        archive (.tar.gz) of a Python environment, or a container (.sif); empty: HZERO_PYTHON or python on every node
#   HZERO_OVERLAY    file with hzero (.sqsh) that the container gets as /user-software; setup_env.sh makes it
#   HZERO_LOCAL      disk of a node, for the archive
# It sets the arrays python and ranks: the command of Python, and what starts one on every rank.
set -uo pipefail
unset SLURM_EXPORT_ENV # of sbatch --export=NONE: srun would pass no variables on
export PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
# RCCL says its version and its faults, which `hzero doctor --log` looks for; without this it says nothing.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Prepared texts, and what torch compiles: a home folder may be read-only on compute nodes, as on Frontier.
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$SLURM_SUBMIT_DIR/runs/cache}
nodes=$SLURM_JOB_NUM_NODES
say() { echo "hzero: job $SLURM_JOB_ID: $*"; }
fail() {
  say "$2" >&2
  exit "$1"
}
MASTER_ADDR=$(hostname -i)
export MASTER_ADDR=${MASTER_ADDR%% *} # of several addresses the first

# A step with one task on each node.
each_node() { srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 "$@"; }
# A step with all ranks. When one ends, the others have two minutes to say whom they have waited for; --kill-on-bad-exit=1 would
# end them first.
# shellcheck disable=SC2034
ranks=(
  srun -N "$nodes" -n $((nodes * SLURM_NTASKS_PER_NODE)) --ntasks-per-node="$SLURM_NTASKS_PER_NODE" "${HZERO_STEP[@]}"
  --kill-on-bad-exit=0 --wait=120
)

# Puts the Python environment on every node, and a folder for MIOpen.
python=("${HZERO_PYTHON:-python}")
local_env=${HZERO_LOCAL:-/tmp}/hzero-$SLURM_JOB_ID
# A node that has died must not hold up the end.
# shellcheck disable=SC2317,SC2329
clean() { timeout -k 5 60 srun -N "$nodes" -n "$nodes" --ntasks-per-node=1 rm -rf "$local_env" "$local_env.lock"; }
prepare_nodes() {
  case ${HZERO_ENV:-} in
  "") ;;
  *.sif)
    python=(singularity exec "$HZERO_ENV" python)
    # One file, bound where its programs were installed (LUMI-AI-Guide#99, 2026-05-07).
    [ -z "${HZERO_OVERLAY:-}" ] ||
      python=(singularity exec -B "$HZERO_OVERLAY:/user-software:image-src=/" "$HZERO_ENV" /user-software/bin/python)
    ;;
  *)
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
}
