# shellcheck shell=bash
# Sourced by the scripts beside it: where things are, how to fail, how to show that a long step runs.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m -- "${VENV:-$ROOT/.venv}")
export ROOT VENV

# Python puts the current folder (python -m, python -c) or the script's folder first on its path. In a
# checkout that would be the source of vllm_zen, without its native library, in place of the installed one.
export PYTHONSAFEPATH=1

die() {
  printf '%s: %s\n' "scripts/$(basename "$0")" "$*" >&2
  exit 1
}

# Splits ARGS into the array `args` the way a shell would quote it, without running anything in it.
# shellcheck disable=SC2034 # args is read by the script that calls
split_args() {
  local lines
  args=()
  [[ -n ${ARGS//[[:space:]]/} ]] || return 0
  lines=$(xargs printf '%s\n' <<<"$ARGS") ||
    die "ARGS=$ARGS cannot be split into arguments: every quote needs its partner. Add or escape the quote."
  mapfile -t args <<<"$lines"
}

step_number=0
step_total=0

# step TITLE COMMAND...: runs the command with its output in a log, tells the time it takes, and shows the
# log if it fails. The command must chain with &&, since bash ignores set -e under `if`.
step() {
  local title=$1 log began=$SECONDS ticker rc=0
  shift
  step_number=$((step_number + 1))
  mkdir -p "$VENV/log"
  log=$VENV/log/${title//[^A-Za-z0-9.]/-}.log
  printf '[%d/%d] %s ...\n' "$step_number" "$step_total" "$title"
  tick "$began" &
  ticker=$!
  "$@" >"$log" 2>&1 </dev/null || rc=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  if ((rc == 0)); then
    printf '[%d/%d] %s: done in %d s\n' "$step_number" "$step_total" "$title" $((SECONDS - began))
    return
  fi
  tail -n 200 "$log" >&2
  die "step '$title' failed with exit status $rc. Its output is above and in $log; run again once the cause is gone."
}

# A line every 15 seconds, until the step ends or the script itself is gone. The sleep must not hold on to
# the caller's pipe or the install lock.
tick() {
  local began=$1 next=15
  while sleep 1 >/dev/null 2>&1 9>&- && kill -0 $$ 2>/dev/null; do
    if ((SECONDS - began >= next)); then
      printf '      %d s\n' $((SECONDS - began))
      next=$((next + 15))
    fi
  done
}
