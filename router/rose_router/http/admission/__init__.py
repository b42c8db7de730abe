"""What stands before every route: who calls, how long bodies are, how much memory they take."""
