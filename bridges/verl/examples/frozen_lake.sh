#!/usr/bin/env bash
# Train with verl on Frozen Lake: this starts the environment service and a rollout server of Volley, then verl.
#   frozen_lake.sh PYTHON MODEL [OVERRIDES of verl]
# PYTHON is that of verl's environment, with the bridge installed; MODEL a Hugging Face folder. Run it in Volley's folder.
set -euo pipefail
python=$1 model=$2
shift 2
folder=$(mktemp -d)
cat > "$folder/run.yaml" <<END
run: {name: frozen-lake, dir: $folder}
model: {path: $model}
data: {env: frozen_lake, n_eval_tasks: 20, env_config: {max_turns: 4}}
grpo_config: {num_generations: 4, off_policy_steps: 1, max_response_length: 64}
trainer: {max_steps: 2, groups_per_step: 4, length_buckets: [2048], checkpointing_options: {save_interval_steps: 100}}
rollout: {engine: {context_length: 2048}, weights_root: $folder/weights}
orchestrator: {max_turns: 4}
services: {env: {port: 8101}}
END
mkdir "$folder/weights"
env_url=http://127.0.0.1:8101 server=http://127.0.0.1:8102
export VOLLEY_TOKEN_FILE_ADMIN=$folder/token
head -c 24 /dev/urandom | base64 | tr -d '/+=' > "$VOLLEY_TOKEN_FILE_ADMIN"

.venvs/base/bin/python -m services.env --config "$folder/run.yaml" > "$folder/env.log" 2>&1 &
.venvs/base/bin/volley serve "$model" --port 8102 --context-length 2048 --weights-root "$folder/weights" \
  --api-key-file "$VOLLEY_TOKEN_FILE_ADMIN" > "$folder/server.log" 2>&1 &
trap 'kill $(jobs -p); wait' EXIT
for url in "$env_url" "$server"; do
  for _ in $(seq 120); do curl -sf "$url/ready" > /dev/null && continue 2; sleep 1; done
  echo "$url is not ready; see $folder" >&2
  exit 1
done

"$python" -m volley_verl config "$folder/run.yaml" --env-url "$env_url" --server "$server" > "$folder/overrides"
eval "overrides=($(tr '\n' ' ' < "$folder/overrides"))"
export VERL_LOGGING_LEVEL=WARN  # a line of level info ends verl 0.9.1 with hybrid_engine=false
"$python" -m verl.trainer.main_ppo "${overrides[@]}" trainer.n_gpus_per_node=1 "$@"
