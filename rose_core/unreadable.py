"""What msgspec raises for bytes of strangers: a format has more ways to be wrong than one.

``DecodeError`` and ``ValidationError`` are its own; text that is no UTF-8 and lists in lists
without end are Python's. Who reads what others sent catches all of them, or a few bytes are a
traceback.
"""

import msgspec

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
