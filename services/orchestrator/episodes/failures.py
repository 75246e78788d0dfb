"""Failures of an episode that the model did not cause. Each class says how it is handled.

    VolleyError
    ├── TooLarge ── PromptTooLong      the task's first prompt leaves no room to answer: no attempt can succeed
    ├── Unavailable
    │   ├── EpisodeLost                the environment service no longer knows the episode (it was restarted)
    │   ├── EpisodeTimeout             the episode's deadline passed
    │   ├── AgentDied                  the agent failed, or ended without a reward
    │   └── AgentSilent                the agent ended without having called the model
    ├── EpisodeChanged                 a repeated turn was answered differently; sampling goes on from there
    ├── PrefixBroken                   a turn would not continue exactly what was sampled before: a defect, never data
    └── WrongVersion                   an evaluation got tokens of another version than the one it measures

The model's own actions (malformed answers, endless text, too many turns) are data and never appear here.
"""

from __future__ import annotations

from shared.errors import TooLarge, Unavailable, VolleyError


class PromptTooLong(TooLarge):
    title = "Prompt longer than the context"


class EpisodeLost(Unavailable):
    title, outage = "Episode lost", True


class EpisodeChanged(VolleyError):
    title = "Episode changed"


class EpisodeTimeout(Unavailable):
    title = "Episode timed out"


class AgentDied(Unavailable):
    title = "Agent died"


class AgentSilent(Unavailable):
    title = "Agent never called"


class PrefixBroken(VolleyError):
    title = "Token prefix broken"
    action = "fail"


class WrongVersion(VolleyError):
    title = "Wrong weight version"
    cause, outage = "infrastructure", True
