# Runs Volley on slices of TPU VMs, by gcloud and ssh. The first slice is the trainer's, each other one has a rollout
# server. `start` and what comes after it may be repeated; the run continues from what is durable.
#
#   create [SLICE…]    make the slices that do not exist
#   install [SLICE…]   copy Volley to every host, and install it
#   start              copy configuration and secrets, start the services (stopping those of an earlier start), and follow
#   follow             follow the run again, if the connection was lost
#   stop               stop the services in order
#   delete [SLICE…]    delete the slices, with their disks
#
# Without names, a command is for all slices.

set -euo pipefail

say() { echo "$(date +%FT%T%z) $*"; }
tpu() { gcloud compute tpus tpu-vm "$@" --zone="$zone" ${project:+--project="$project"} --quiet; }
on() { tpu ssh "$1" --worker="$2" --command="$3"; } # slice, worker, command
copy() { tpu scp --recurse "$2" "$1:$3" --worker=all; } # slice, file here, path there

chosen() { [[ -z $names || " $names " = *" $1 "* ]]; } # slice

create() {
  local i state
  for i in "${!slices[@]}"; do
    chosen "${slices[i]}" || continue
    if state=$(tpu describe "${slices[i]}" --format='value(state)' 2>/dev/null); then
      say "slice ${slices[i]} exists (${state:-state unknown})"
    else
      tpu create "${slices[i]}" --accelerator-type="${types[i]}" ${create_options[@]+"${create_options[@]}"}
    fi
  done
}

install() {
  local slice
  archive=$(mktemp)
  trap 'rm -f "$archive"' EXIT
  git -C "$project_folder" archive --format=tar.gz HEAD >"$archive"
  for slice in "${slices[@]}"; do
    chosen "$slice" || continue
    copy "$slice" "$archive" volley.tar.gz
    on "$slice" all "mkdir -p volley && tar -xzf volley.tar.gz -C volley && make -C volley install VOLLEY_ACCELERATOR=$accelerator"
  done
}

# Sets `hosts` (addresses), `slice_of` and `worker_of`, by the position of a host.
find_hosts() {
  local slice address found n
  hosts=() slice_of=() worker_of=()
  for slice in "${slices[@]}"; do
    found=$(tpu describe "$slice" --format='value(networkEndpoints[].ipAddress)')
    n=0
    for address in ${found//[;,]/ }; do
      hosts+=("$address") slice_of+=("$slice") worker_of+=("$n")
      n=$((n + 1))
    done
    if [[ $slice = "${slices[0]}" && $n != "$trainers" ]]; then
      say "slice $slice has $n hosts, and services.trainer.num_processes is $trainers"
      exit 2
    elif [[ $slice != "${slices[0]}" && $n != 1 ]]; then
      say "slice $slice has $n hosts, and a rollout server takes a single one: use a smaller type"
      exit 2
    fi
  done
}

start() {
  local slice i work
  find_hosts
  stop || exit 1
  for slice in "${slices[@]}"; do
    on "$slice" all "umask 077; mkdir -p volley-launch/files; chmod 700 volley-launch"
    copy "$slice" "$folder/run.yaml" volley-launch/
    copy "$slice" "$folder/secrets" volley-launch/
    for ((i = 0; i < ${#files[@]}; i += 2)); do copy "$slice" "${files[i]}" "${files[i + 1]}"; done
    on "$slice" all "chmod -R go= volley-launch/secrets"
  done
  for i in "${!hosts[@]}"; do
    work="node ~/volley-launch --hosts $(IFS=, && echo "${hosts[*]}") --index $i"
    ((${#hosts[@]} > 1)) || work="train --config ~/volley-launch/run.yaml"
    say "host $i: ${hosts[i]} (${slice_of[i]}, worker ${worker_of[i]}): volley $work"
    on "${slice_of[i]}" "${worker_of[i]}" "cd volley && rm -f ~/volley-launch/exit && { nohup setsid bash -c '
      .venvs/base/bin/volley $work & echo \$! >~/volley-launch/pid; wait \$!; echo \$? >~/volley-launch/exit
    ' >~/volley-launch/node.log 2>&1 </dev/null & }" # what holds the output of ssh would keep ssh from ending
  done
  follow
}

follow() {
  local code
  # shellcheck disable=SC2016 # for the host's shell
  until on "${slices[0]}" 0 'tail -n +1 -f volley-launch/node.log & until [ -e volley-launch/exit ]; do sleep 1; done
      sleep 1; kill $!; true' && code=$(on "${slices[0]}" 0 'cat volley-launch/exit'); do
    say "${slices[0]} cannot be reached, and the run may go on: trying again until Ctrl-C"
    sleep "${VOLLEY_RETRY_PAUSE:-10}"
  done
  if ((code != 0)); then say "the first host ended with exit code $code"; fi
  report
  exit "$code"
}

# Names the hosts that have ended with an error, or cannot be reached.
report() {
  local i code
  find_hosts
  for i in "${!hosts[@]}"; do
    code=$(on "${slice_of[i]}" "${worker_of[i]}" "for n in \$(seq ${VOLLEY_SETTLE:-20}); do
      [ -e volley-launch/exit ] || sleep 1; done; cat volley-launch/exit 2>/dev/null || echo still running") || code=unreachable
    if [[ $code =~ ^[0-9]+$ ]]; then code="exit code $code"; fi
    [[ $code = "exit code 0" ]] || say "host $i: ${hosts[i]} (${slice_of[i]}, worker ${worker_of[i]}): $code"
  done
}

# Shell text for a host: sets `pid`, and succeeds while the services of its last start run.
# shellcheck disable=SC2016
running='pid=$(cat volley-launch/pid 2>/dev/null) && grep -qs bin/volley "/proc/$pid/cmdline"'

stop() {
  local slice failed=0
  for slice in "${slices[@]}"; do
    on "$slice" all "if $running; then kill -TERM \$pid || true; fi" || say "slice $slice cannot be reached"
  done
  for slice in "${slices[@]}"; do
    on "$slice" all "for n in \$(seq $patience); do $running || exit 0; sleep 1; done; exit 1" ||
      { say "slice $slice cannot be reached, or its services still run" && failed=1; }
  done
  return $failed
}

delete() {
  local slice failed=
  for slice in "${slices[@]}"; do
    chosen "$slice" || continue
    tpu delete "$slice" || failed="$failed $slice"
  done
  [[ -z $failed ]] || { say "not deleted:$failed" && exit 1; }
}

command=${1-}
names=${*:2}
for name in $names; do
  [[ " ${slices[*]} " = *" $name "* ]] || { say "$name is none of the slices: ${slices[*]}" && exit 2; }
done
case $command in
create | install | delete) "$command" ;;
start | follow | stop)
  [[ -z $names ]] || { say "$command is for all slices, and takes no names" && exit 2; }
  "$command"
  ;;
*) say "usage: ${0##*/} create | install | start | follow | stop | delete" && exit 2 ;;
esac
