"""What a server says about an error, without what it quotes of the request.

Errors are kept in the database, and prompts are not: a validation error of vLLM's repeats the value
that it did not like, under the key `input`.
"""

from __future__ import annotations

import re

MAX_CHARS = 300
_QUOTED = re.compile(r"""(\\?['"])input\1\s*:.*""", re.DOTALL)


def told(text: str) -> str:
    """Return the part of a server's error message that may be kept, at most `MAX_CHARS` long."""
    return _QUOTED.sub("…", text)[:MAX_CHARS]
