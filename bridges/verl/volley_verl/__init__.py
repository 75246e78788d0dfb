"""Volley's environments and rollout servers in verl 0.9.1. It imports nothing of Volley: it speaks HTTP.

config       a Volley run's configuration as Hydra overrides for verl (`python -m volley_verl config RUN.yaml`)
dataset      an environment service's tasks as verl's dataset
episode      an episode in the environment service, as agent loop and rewards play it
agent_loop   verl's agent loop that plays episodes
reward       verl's reward function and reward manager that ask the environment service
rollout      Volley's rollout servers as verl's server-mode rollout
weights      verl's weights to Volley's rollout servers
trainer      roles, resource pool and trainers, for both of verl's trainers
plugin       registers all of it with verl, which loads it by its entry point
"""
