"""Why an episode fails for reasons that are not the model's. What is done about each class is said by the class.

    VolleyError
    ├── TooLarge ── PromptTooLong      the task's first prompt leaves no room to answer: no attempt can succeed
    ├── Unavailable
    │   ├── EpisodeLost                the environment service no longer knows the episode (it was restarted)
    │   └── EpisodeTimeout             the episode's deadline passed
    ├── PrefixBroken                   a turn would not continue exactly what was sampled before: a defect, never data
    └── WrongVersion                   an evaluation got tokens of another version than the one it measures

Whatever the model does (malformed answers, endless text, too many turns) is data and never appears here.
"""

from __future__ import annotations

from shared.errors import TooLarge, Unavailable, VolleyError


class PromptTooLong(TooLarge):
    title = "Prompt longer than the context"


class EpisodeLost(Unavailable):
    title = "Episode lost"


class EpisodeTimeout(Unavailable):
    title = "Episode timed out"


class PrefixBroken(VolleyError):
    title = "Token prefix broken"
    action = "fail"


class WrongVersion(VolleyError):
    title = "Wrong weight version"
    cause = "infrastructure"
