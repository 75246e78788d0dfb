chmod -R go= "$HOME/volley-launch/secrets"
volley=$HOME/sky_workdir/.venvs/base/bin/volley
if [ "$SKYPILOT_NUM_NODES" = 1 ]; then
  exec "$volley" train --config "$HOME/volley-launch/run.yaml"
fi
exec "$volley" node "$HOME/volley-launch" --hosts "$SKYPILOT_NODE_IPS" --index "$SKYPILOT_NODE_RANK"
