"""What callers speak: each module reads one dialect into ``TurnRequest`` and answers in kind."""
