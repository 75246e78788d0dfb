# Starts the run on the nodes of a Slurm job: a step of srun for each, which runs `volley node`. The job ends with the
# run, with its exit code. Before the time limit it stops in order and queues itself again; the run then continues from
# what is durable. The first nodes are the trainer's, the others have rollout servers.

set -u

say() { printf '%(%FT%T%z)T %s\n' -1 "$*"; }
alive() { [[ -n ${pids[$1]-} ]] && kill -0 "${pids[$1]}" 2>/dev/null; }
finished() { grep -qs '"finished": true' "$run/run.json"; }
state() { sinfo --noheader --nodes="$1" --format=%T 2>/dev/null || echo unknown; }
role() { if (($1 < trainers)); then echo trainer; else echo rollout; fi; }

start() { # node $1
  local command=("$volley" node "$folder" --hosts "$hosts" --index "$1" --first-port "$port")
  ((${#nodes[@]} > 1)) || command=("$volley" train --config "$folder/run.yaml")
  srun --nodes=1 --ntasks=1 --nodelist="${nodes[$1]}" --overlap --cpu-bind=none "${command[@]}" &
  pids[$1]=$! since[$1]=$SECONDS due[$1]=
}

stop() { # the reason
  [[ -z $stopping ]] || return
  stopping=yes
  say "$1: stopping all services"
  scancel --quiet --signal=TERM "$SLURM_JOB_ID" # reaches the tasks of all steps; srun itself would kill them
}

ended() { # node $1
  local code
  wait "${pids[$1]}"
  code=$?
  pids[$1]=
  if (($1 == 0 && code == 0)) && ! finished; then code=1; fi
  # After a crash, 2 may mean that a port is still taken by what the crash has left.
  if (($1 == 0 && (code < 2 || code == 2 && tries[0] == 0))) || [[ -n $stopping ]]; then
    if (($1 == 0)); then result=${result:-$code}; fi
  elif ((code == 2 && tries[$1] == 0)); then
    say "node ${nodes[$1]} ($(role "$1")) ended with exit code 2"
    result=2
    stop "wrong configuration"
  elif ((code == 0)); then # it has seen the end of the run, or srun has lost it, which is no error to srun
    due[$1]=$((SECONDS + 2 * pause)) reason[$1]="ended before the run"
  else
    retry "$1" "ended with exit code $code" $((pause * 2 ** tries[$1]))
  fi
}

retry() { # node $1, for reason $2, in $3 seconds
  say "node ${nodes[$1]} ($(role "$1")) $2; Slurm says it is $(state "${nodes[$1]}")"
  if ((SECONDS - since[$1] > 600)); then tries[$1]=0; fi
  reason[$1]=''
  if ((tries[$1]++ < retries)); then
    due[$1]=$((SECONDS + $3))
    return
  fi
  due[$1]='' lost[$1]=yes
  say "node ${nodes[$1]} ($(role "$1")) is given up after $retries more tries"
  if (($1 < trainers || ${#lost[@]} == ${#nodes[@]} - trainers)); then
    requeue=yes
    stop "the run cannot go on without it"
    if (($1 == 0)); then result=1; fi
  fi
}

# A job that a task of an array submits inherits the task's variables; squeue tells N/A for it.
if [[ -n ${SLURM_ARRAY_JOB_ID-} && $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%K) != N/A ]]; then
  say "each task of a job array would start this run: submit it without --array (it queues itself again at its time limit)"
  exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} < needed)); then
  say "the job has ${#nodes[@]} nodes (${nodes[*]}), and the run needs $needed: use sbatch --nodes=$needed or more"
  exit 2
fi
if ((${SLURM_RESTART_COUNT:-0} == 0)) && [[ -z ${VOLLEY_AGAIN-} ]]; then
  rm -f "$folder/hosts/begun"
elif [[ -e $folder/hosts/begun && ! -e $run/run.json ]]; then
  say "$run has begun, and is not on ${nodes[0]}: put run.dir on a file system that all nodes mount"
  exit 2
fi
while read -r node; do # of the start before
  state=$(state "$node")
  if [[ $state =~ down|drain|fail ]]; then say "node $node of an earlier start is $state"; fi
done < <(cat "$folder/hosts/nodes" 2>/dev/null)
printf '%s\n' "${nodes[@]}" >"$folder/hosts/nodes"
hosts=$(IFS=, && echo "${nodes[*]}")
port=${VOLLEY_FIRST_PORT:-$((20000 + SLURM_JOB_ID % 400 * 30))}
retries=${VOLLEY_RETRIES:-5} pause=${VOLLEY_RETRY_PAUSE:-10} poll=${VOLLEY_POLL:-1}
stopping='' requeue='' result=''
declare -A pids since due tries reason lost

trap 'requeue=yes; stop "the time limit is near"' USR1
trap 'stop SIGTERM' TERM
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): ${#nodes[@]} nodes: ${nodes[*]}"
for i in "${!nodes[@]}"; do
  tries[$i]=0
  start "$i"
done
while [[ -z $result ]] || alive 0; do
  for i in "${!nodes[@]}"; do
    if [[ -n ${pids[$i]} ]] && ! alive "$i"; then ended "$i"; fi
    if [[ -n ${due[$i]} && -z $stopping ]] && ((SECONDS >= due[$i])); then
      if [[ -n ${reason[$i]-} ]] && finished; then
        due[$i]=''
      elif [[ -n ${reason[$i]-} ]]; then
        retry "$i" "${reason[$i]}" 0
      else
        start "$i"
      fi
    fi
  done
  if [[ -e $run/run.json && ! -e $folder/hosts/begun ]]; then touch "$folder/hosts/begun"; fi
  if [[ -n $stopping && -z ${pids[0]} ]]; then result=${result:-143}; fi # it was not running
  sleep "$poll" &
  wait $! # a signal interrupts it at once
done
((result == 0)) || say "the first node (${nodes[0]}) ended with exit code $result"

[[ -n $stopping ]] || scancel --quiet --signal=TERM "$SLURM_JOB_ID" # the other nodes, if they have not seen the end
patience=$((SECONDS + 60)) left=yes
while [[ -n $left ]] && ((SECONDS < patience)); do
  sleep "$poll"
  left=''
  for i in "${!nodes[@]}"; do if alive "$i"; then left=yes; fi; done
done
if [[ -n $requeue ]] && ((result != 0 && result != 2)); then
  say "queueing job $SLURM_JOB_ID again; the run will continue from what is durable"
  trap - TERM
  left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)
  if ((${left:-${#nodes[@]}} < ${#nodes[@]})); then
    # With --no-kill the job has lost nodes for good, and would come back without them.
    VOLLEY_AGAIN=yes sbatch --nodes=${#nodes[@]} "$folder/job.sh" && exit "$result"
  else
    scontrol requeue "$SLURM_JOB_ID" && sleep 300 # Slurm ends this script
  fi
  say "job $SLURM_JOB_ID cannot be queued again: submit this script once more"
fi
exit "$result"
