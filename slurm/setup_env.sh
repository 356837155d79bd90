#!/bin/bash
# Builds the Python environment of a machine, with hzero from this checkout, as its jobs take it. On a login node, from the root of
# a checkout:
#
#   bash slurm/setup_env.sh frontier PROJECT      a conda environment, packed as hzero.tar.gz, which jobs broadcast with sbcast
#   bash slurm/setup_env.sh lumi project_ID       packages as hzero.sqsh, which jobs lay over LUMI's container
#
# Nothing that exists is replaced. Variables:
#   HZERO_OUT     folder of the result (default: where slurm/MACHINE.env looks for it)
#   HZERO_WHEELS  folder of wheels, for a machine without a package index: nothing else is installed from then
# pip takes its index from its own settings, PIP_INDEX_URL or pip.conf; torch for ROCm comes from PyTorch's, as OLCF's guide has it.
# Sources are those of the environment files; [torch] and [sbcast] of frontier.env, [laif] and [ai] of lumi.env.
set -euo pipefail
say() { echo "setup_env: $*" >&2; }
fail() {
  say "$@"
  exit 2
}
machine=${1:-} project=${2:-}
project=${project,,} # as Slurm and the folders of Orion have it
case $machine in frontier | lumi) ;; *) fail "MACHINE: found '$machine'; expected frontier or lumi" ;; esac
[ -n "$project" ] || fail "PROJECT: found none; expected the account that jobs are charged to"
[ -f slurm/setup_env.sh ] && [ -f pyproject.toml ] || fail "found no checkout in $PWD; expected its root"
USER=${USER:-$(id -un)}
export USER SLURM_JOB_ACCOUNT=$project SLURM_JOB_NUM_NODES=2
# The modules with which the environment will run; a missing one ends this script.
# shellcheck source=slurm/frontier.env
set +u && source "slurm/$machine.env" && set -u
case $machine in
frontier) target=$HZERO_ENV first="slurm/first_run.sbatch" ;;
lumi) target=$HZERO_OVERLAY first="-p standard-g -C '' --gpus-per-node=8 --exclusive slurm/first_run.sbatch lumi" ;;
esac
[ -z "${HZERO_OUT:-}" ] || target=$HZERO_OUT/${target##*/}
[ ! -e "$target" ] || fail "$target exists; remove it, or give another folder as HZERO_OUT"
mkdir -p "${target%/*}"
work=$(mktemp -d "${target%/*}/setup_env.XXXXXX")
trap 'rm -rf "$work"' EXIT
from=() torch_from=(--index-url https://download.pytorch.org/whl/rocm7.1)
if [ -n "${HZERO_WHEELS:-}" ]; then from=(--no-index --find-links "$HZERO_WHEELS") torch_from=("${from[@]}"); fi
# Compiles the kernels for gfx90a; a missing hipcc is an error.
export HZERO_BACKEND=hip PIP_NO_CACHE_DIR=1

if [ "$machine" = frontier ]; then
  # Python 3.12 and torch 2.10.0 for ROCm 7.1: the stack of OLCF's guide. [torch]
  conda create --yes --quiet -p "$work/env" -c conda-forge python=3.12 conda-pack
  pip() { "$work/env/bin/python" -m pip install "$@"; }
  lock=constraints/frontier.txt # the same packages for everybody
  pip "$(grep ^torch== "$lock")" "${torch_from[@]}"
  # Against Cray MPICH and its library for GPUs, with this machine's compiler: a wheel would bring another MPI. [torch]
  MPICC="cc -shared" pip -c "$lock" --no-binary=mpi4py "${from[@]}" mpi4py
  pip -c "$lock" "${from[@]}" ".[train,data]"
  "$work/env/bin/python" -m hzero --version
  "$work/env/bin/conda-pack" --quiet -p "$work/env" -o "$work/packed.tar.gz"
  mv "$work/packed.tar.gz" "$target"
else
  # torch, DeepSpeed, MPI and RCCL's plug-in stay the container's; all files are in one, since small files strain Lustre. [laif], [ai]
  mkdir "$work/user-software"
  own='torch|deepspeed|numpy|mpi4py'
  inside() { singularity exec -B "$work/user-software:/user-software" -B "$PWD" "$HZERO_ENV" "$@"; }
  inside python -m venv --system-site-packages /user-software
  inside /user-software/bin/python -m pip list --format=freeze | grep -iE "^($own)==" >"$work/user-software/pins.txt"
  grep -vE "^(#|($own)==)" constraints/lumi.txt >>"$work/user-software/pins.txt"
  inside /user-software/bin/python -m pip install -c /user-software/pins.txt "${from[@]}" ".[train]"
  inside /user-software/bin/python -m hzero --version
  mksquashfs "$work/user-software" "$work/packed.sqsh" -quiet -no-progress
  mv "$work/packed.sqsh" "$target"
fi
say "written: $target ($(du -h "$target" | cut -f1)); next: sbatch -A $project -N 2 $first"
case $machine:$PWD/ in frontier:"${HOME:-none}"/*) say "submit from a checkout on Orion: nodes cannot write logs and runs to $PWD" ;; esac
[ -z "${HZERO_OUT:-}" ] || say "HZERO_OUT is set: first write this path into slurm/$machine.env, where jobs look for it"
