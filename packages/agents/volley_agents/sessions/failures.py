"""Errors that agents get on their calls.

VolleyError
├── Unauthorized                   the key is missing or wrong
├── Conflict                       an idempotency key was used with another body
├── InputError
│   ├── ContextExceeded            the conversation leaves no room to answer
│   ├── SessionOver                the session has ended, or is void
│   └── CallsUsedUp                the session has made all the calls that it may make
└── RateLimited                    too many calls of the session run at once
"""

from __future__ import annotations

from shared.errors import InputError


class SessionOver(InputError):
    status, title, api_code = 410, "Session over", "session_over"


class CallsUsedUp(InputError):
    status, title, api_code = 400, "Calls used up", "calls_used_up"
