"""Answers of turns, plain and streamed, in each dialect."""
