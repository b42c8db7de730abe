"""One turn, gathered leg by leg: its tokens, their weight versions, their text."""
