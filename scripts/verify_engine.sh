# Sourced by verify_vllm.sh and verify_sglang.sh, which set `engine`, `packages` (what is installed, for the stamp) and the function
# `install`, which fills the environment $venv. Then runs the fixtures' tests, or with --config FILE the proof of a run.
export venv=".engines/$engine"
log=".engines/$engine.log"
stamp="$venv/.ready-$(echo "$packages" | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  echo "installing ${packages%% *} in $venv (some minutes); log: $log"
  mkdir -p .engines
  export -f install
  if ! timeout "${INSTALL_SECONDS:-1200}" bash -c install >"$log" 2>&1; then
    echo "$engine cannot be installed; the end of $log:" >&2
    tail -15 "$log" >&2
    exit 75
  fi
  touch "$stamp"
fi

python="$PWD/$venv/bin/python"
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" TOKENIZERS_PARALLELISM=false
for argument in "$@"; do
  if [ "$argument" = --config ]; then
    source scripts/setup.sh demo
    exec headwright prove --engine "$engine" --engine-python "$python" "$@"
  fi
done
source scripts/setup.sh demo,dev
export "HEADWRIGHT_$(echo "$engine" | tr a-z A-Z)=$python" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
exec python -m pytest -m "$engine" "tests/test_$engine.py" "$@"
