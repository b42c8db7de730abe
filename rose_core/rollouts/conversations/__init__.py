"""Turns that belong together: by a harness's messages, or by the tokens they begin with."""
