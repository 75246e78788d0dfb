"""Errors that agents get on their calls.

VolleyError
├── Unauthorized                   the key is missing or wrong
├── Conflict                       an idempotency key was used with another body
├── InputError
│   ├── SessionOver                the session has ended, or is void
│   ├── ContextExceeded            the conversation leaves no room to answer
│   └── CallsUsedUp                the session has made all the calls that it may make
└── RateLimited                    too many calls of the session run at once
"""

from __future__ import annotations

from shared.errors import InputError


class SessionOver(InputError):
    status, title = 410, "Session over"


class ContextExceeded(InputError):
    status, title = 400, "Conversation longer than the context"


class CallsUsedUp(InputError):
    status, title = 400, "Calls used up"
